"""Models with LoRA adapters of peft: the plans of the models without them, proven in the same way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import peft
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, inject_adapter_in_model
from processes import on_ranks
from small_models import batch, small_config, small_model, whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_runs import TWO_BY_TWO, Recipe, compare
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import shardplan
from shardplan import applied
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.user_inputs import read_plan
from shardplan.core.diagnostics import PlanError
from shardplan.core.plan import PlanFile, overlays_of
from shardplan.core.tree import ParameterInfo
from shardplan.model import find_any, tree_of
from shardplan.model.adapters import adapters_in, unwrapped
from shardplan.model.reduced.reduced_model import ReducedModel, make_reduced_model
from shardplan.runtime.parallel import reading
from shardplan.styles import STYLES
from shardplan.styles import stored_parameters as stored
from shardplan.styles.adapter_styles import DIVIDED, adapter_style
from shardplan.styles.style_record import WHOLE, WHOLE_PARTIAL, ParameterStyle
from tests.collective_counter import CollectiveCounter
from tests.proofs import (
    Case,
    assert_equal,
    compare_results,
    fake_mesh,
    planned,
    ranked,
    step,
    unsharded,
)
from tests.proofs import collect as collect_results
from tests.proofs import (
    on_ranks as on_simulated_ranks,
)

NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "summary_first_dropout")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EMBEDDED = ["embed_tokens", "lm_head", "q_proj", "down_proj"]


@dataclass(frozen=True)
class Adapted:
    """A model type and peft's configuration of its adapter."""

    model: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""

    def meta(self) -> PeftModel:
        """The model of the type's default size on the meta device."""
        with torch.device("meta"):
            return get_peft_model(causal(self.model, **self.settings), LoraConfig(**self.options))


CASES = {
    "llama": Adapted("llama", {"r": 16, "lora_alpha": 32, "target_modules": ALL}),
    "llama, some": Adapted("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [3, 7]}),
    "llama, ranks": Adapted(
        "llama", {"r": 16, "target_modules": ["q_proj", "o_proj"], "rank_pattern": {"q_proj": 4}, "use_rslora": True}
    ),
    "llama, tables": Adapted("llama", {"target_modules": EMBEDDED}, {"pad_token_id": 0}),
    "llama, saved": Adapted("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "llama, DoRA": Adapted("llama", {"use_dora": True, "target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "qwen2, biases": Adapted("qwen2", {"target_modules": ALL}),
    "qwen3": Adapted("qwen3", {"target_modules": "all-linear"}),
    "gpt2": Adapted("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, tables": Adapted("gpt2", {"target_modules": ["wte", "wpe", "c_attn"]}),
    "gpt2, lora_bias": Adapted("gpt2", {"target_modules": ["c_attn", "c_proj"], "lora_bias": True}),
    "phi3": Adapted("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "mixtral": Adapted("mixtral", {"target_modules": ["q_proj", "v_proj", "o_proj"]}, {"output_router_logits": True}),
    "gemma, tied": Adapted("gemma", {"target_modules": [*ALL, "embed_tokens"]}, plan="llama"),
}


def causal(name: str, **settings: Any) -> nn.Module:
    config = AutoConfig.for_model(name, **settings)
    for attribute in NO_DROPOUT:
        if hasattr(config, attribute):
            setattr(config, attribute, 0.0)
    return AutoModelForCausalLM.from_config(config)


@functools.cache
def reduced_model(name: str, tp: int) -> ReducedModel:
    return make_reduced_model(CASES[name].meta(), tp=tp, experts_implementation="eager")


def case(name: str, tp: int, *, sp: bool, **options: Any) -> Case:
    small, adapted = reduced_model(name, tp), CASES[name]
    options = {"sequence_parallel": sp, **options}
    return Case(small.build, small.inputs(), adapted.plan or adapted.model, tp, options=options)


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


KINDS = ("llama", "gpt2", "phi3")
FAST = {(name, 2, True) for name in CASES} | {(name, 2, False) for name in KINDS}
SLOW = {(name, 4, True) for name in KINDS}
MATRIX = [(name, tp, sp) for name in CASES for tp in (2, 4) for sp in (False, True)]


def marks(one: tuple[str, int, bool]) -> tuple:
    return () if one in FAST else (pytest.mark.slow,) if one in SLOW else (pytest.mark.exhaustive,)


@pytest.mark.parametrize(
    ("name", "tp", "sp"),
    [pytest.param(*c, marks=marks(c), id=f"{c[0]}-tp{c[1]}{'-sp' * c[2]}") for c in MATRIX],
)
def test_equal_to_the_unsharded_model(name, tp, sp):
    """Loss, logits and the gradient of everything that is trained; nothing of it is zero."""
    rows = case(name, tp, sp=sp).rows()
    assert_equal(rows)
    assert {row.name for row in rows} == {"loss", "logits"} | trained(reduced_model(name, tp).build())
    assert {row.verdict for row in rows} == {"equal"}


# Three on every change; the others belong to the slow rest.
SOME = ("llama", "gpt2, tables", "mixtral")
EACH = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", EACH)
def test_the_model_itself_validates_with_the_plan_of_its_type(name):
    model = CASES[name].meta()
    report = shardplan.validate(model, "auto", {"tp": 2}, strict=False)
    assert report.ok and not any(d.code.startswith(("SP2", "SP4", "SP5")) for d in report.diagnostics), str(report)
    assert report.variants == ("tensor_parallel", "sequence_parallel")


@pytest.mark.parametrize("name", EACH)
def test_the_small_copy_has_the_adapters_of_the_original(name):
    def seen(model: nn.Module) -> set[tuple[str, str]]:
        tree = tree_of(model)
        return {(tree.pattern(n), str(p.adapter)) for n, (_, p) in tree.parameters.items() if p.requires_grad}

    original, small = CASES[name].meta(), reduced_model(name, 2).build()
    assert seen(original) == seen(small)
    assert all(bool(p.any()) for p in small.parameters())
    for _, wrapper in adapters_in(small):
        (scaling,) = wrapper.scaling.values()
        assert scaling in {next(iter(other.scaling.values())) for _, other in adapters_in(unwrapped(original))}


def test_ranks_stay_in_relation():
    ranks = {
        name.rpartition(".")[2]: w.r["default"] for name, w in adapters_in(reduced_model("llama, ranks", 2).build())
    }
    assert ranks.pop("q_proj") < min(ranks.values()) and len(set(ranks.values())) == 1


def test_peft_s_own_wrapper_is_sharded_inside():
    """The wrapper itself is called; names of its state dict are as before."""
    name, tp = "llama", 2
    inputs = reduced_model(name, tp).inputs()

    def build() -> PeftModel:
        torch.manual_seed(0)
        inner = reduced_model(name, tp).build()
        config = LoraConfig(r=4, target_modules=ALL, init_lora_weights=False)
        plain = AutoModelForCausalLM.from_config(inner.config).train()
        return get_peft_model(plain, config)

    keys = list(build().state_dict())
    reference = unsharded(build(), copy.deepcopy(inputs))
    with on_simulated_ranks(build(), "llama", tp, sequence_parallel=True) as model:
        values = step(model, ranked(inputs, tp))
        values["loss"].backward()
        assert list(model.state_dict()) == keys
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert str(applied(model)) == str(applied(unwrapped(model)))
    rows = compare_results(reference, collect_results(model, values))
    assert_equal(rows)
    assert {row.name for row in rows} == {"loss", "logits"} | trained(build())


def test_the_model_without_its_adapters():
    """`disable_adapter` runs the sharded layers alone, and the original of what is trained whole."""

    def call(model: nn.Module, inputs: dict) -> dict:
        for module in model.modules():
            if hasattr(type(module), "adapter_layer_names"):
                module.enable_adapters(False)
        return {"logits": model(**inputs).logits}

    name = "llama, saved"
    assert_equal(Case(reduced_model(name, 2).build, reduced_model(name, 2).inputs(), "llama", 2, call).rows())


# The others are the first one in other clothes.
OTHER_WAYS = [
    "injected",
    pytest.param("transformers", marks=pytest.mark.slow),
    "two adapters",
    pytest.param("one of two", marks=pytest.mark.slow),
    pytest.param("classifier", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", OTHER_WAYS)
def test_other_ways_to_adapters(how):
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    with torch.device("meta"):
        model = causal("llama")
        if how == "injected":
            model = inject_adapter_in_model(config, model)
        elif how == "transformers":
            model.add_adapter(config)
        elif how == "classifier":
            llama = AutoConfig.for_model("llama", num_labels=4, pad_token_id=0)
            llama.classifier_dropout = 0.0
            config.task_type = "SEQ_CLS"
            model = get_peft_model(AutoModelForSequenceClassification.from_config(llama), config)
        else:
            model = get_peft_model(model, config)
            model.add_adapter("second", LoraConfig(r=8, lora_alpha=3, target_modules=["q_proj", "down_proj"]))
            model.base_model.set_adapter(["default", "second"] if how == "two adapters" else ["second"])
    report = shardplan.verify(model, "auto", {"tp": 2})
    assert report.proven and report.proof is not None
    count = {"two adapters": 16, "one of two": 8, "classifier": 9}.get(how, 8)
    compared = [[row for row in proof.rows if row.kind == "gradient"] for proof in report.proof.variants]
    assert [len(rows) for rows in compared] == [count] * 2
    assert {row.verdict for row in report.proof.rows} == {"equal"}


def test_the_adapter_that_is_trained_may_be_changed_afterwards():
    """What is frozen when the plan is compiled has no part in the block's reduction, and is reduced on its own."""
    with torch.device("meta"):
        model = get_peft_model(causal("llama"), LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
        model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    small = make_reduced_model(model, tp=2)

    def second(model: nn.Module, inputs: dict) -> dict:
        for _, wrapper in adapters_in(model):
            wrapper.set_adapter("second")
        return step(model, inputs)

    rows = Case(small.build, small.inputs(), "llama", 2, second, {"sequence_parallel": True}).rows()
    assert_equal(rows)
    assert any("lora_A.second" in row.name for row in rows) and not any("default" in row.name for row in rows)


# Mistakes.


def mutated(monkeypatch: pytest.MonkeyPatch, part: str, shard: str | None, wrong: ParameterStyle) -> None:
    """The table with another entry for one part of adapters of weights that are split so."""

    def style_of(style, parameter: ParameterInfo):
        kind = "bias" if len(parameter.shape) == 1 and parameter.adapter == "B" else parameter.adapter
        right = adapter_style(style, parameter)
        return wrong if (kind, style.weight.shard) == (part, shard) else right

    monkeypatch.setattr(stored, "adapter_style", style_of)


MISTAKES = [
    ("llama", "A", "out", WHOLE, {"SP401"}),
    ("llama", "B", "out", WHOLE_PARTIAL, None),
    ("llama", "A", "in", WHOLE_PARTIAL, None),
    ("llama", "B", "in", WHOLE, {"SP401"}),
    ("gpt2, lora_bias", "bias", "in", WHOLE, None),
    ("llama, tables", "embedding_A", "in", WHOLE, None),
    ("llama, tables", "embedding_B", "in", WHOLE, {"SP401"}),
    ("phi3", "B", "out", ParameterStyle("out", "V"), None),
    ("llama, DoRA", "magnitude", "out", WHOLE, None),
]


@functools.cache
def right_layouts(name: str, sp: bool) -> tuple[ModelLayouts, PlanFile]:
    """Those of an adapted model, with a plan that is right about them."""
    model = find_any(CASES[name].meta())
    layouts, plan = ModelLayouts(model, 2), read_plan("auto", model).plan
    assert layouts.check(plan, overlays_of(sp)).ok
    return layouts, plan


@pytest.mark.parametrize("sp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tp", "sp"])
@pytest.mark.parametrize(("name", "part", "shard", "wrong", "codes"), MISTAKES, ids=lambda value: str(value)[:24])
def test_a_wrong_way_to_hold_an_adapter_is_caught_by_the_layout_check(monkeypatch, name, part, shard, wrong, codes, sp):
    layouts, plan = right_layouts(name, sp)
    mutated(monkeypatch, part, shard, wrong)
    report = layouts.check(replace(plan), overlays_of(sp), help=False)  # another object: each is checked once
    found = {d.code for d in report.diagnostics}
    assert found and all(code.startswith("SP4") for code in found)
    assert codes is None or found == codes


@pytest.mark.usefixtures("no_repairs")
def test_a_wrong_way_to_hold_an_adapter_is_not_applied(monkeypatch):
    mutated(monkeypatch, "A", "out", WHOLE)
    with pytest.raises(PlanError, match="SP401"):
        shardplan.compile_plan(shown(), {"tp": 2}, "auto")


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("part", "shard", "names"), [("A", "out", "lora_A"), ("B", "in", "lora_B")])
def test_the_numeric_proof_says_the_same(monkeypatch, part, shard, names, sp):
    mutated(monkeypatch, part, shard, WHOLE)
    wrong = case("llama", 2, sp=sp).wrong()
    split = ("o_proj", "down_proj") if shard == "in" else ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    adapters = trained(reduced_model("llama", 2).build())
    assert wrong.keys() == {n for n in adapters if names in n and any(layer in n for layer in split)}


def test_a_reduction_that_is_missing_at_run_time_is_refuted(monkeypatch):
    monkeypatch.setattr(reading, "summed", lambda mesh, tensors, dtype: list(tensors))
    wrong = case("llama", 2, sp=True).wrong()
    assert wrong and all(("lora_A" in n) != ("o_proj" in n or "down_proj" in n) for n in wrong)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"target_modules": ["q_proj", "o_proj"], "use_dora": True}, "SP390", "DoRA"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "SP390", "DoRA"),
    ],
)
def test_what_cannot_be_split_is_refused(options, code, words):
    report = shardplan.validate(Adapted("llama", options).meta(), "auto", {"tp": 2})
    (finding,) = report.diagnostics
    assert finding.code == code and finding.help and words in str(report)
    assert shardplan.validate(Adapted("llama", options).meta(), "auto", {"tp": 1}).ok


def test_adapters_of_single_parameters_are_refused():
    options = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    report = shardplan.validate(Adapted("mixtral", options).meta(), "auto", {"tp": 2})
    (finding,) = report.diagnostics
    assert finding.code == "SP390" and "target_modules" in finding.help


@pytest.mark.parametrize(
    ("config", "code"),
    [
        (IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]), "SP390"),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "SP516"),
    ],
    ids=["IA3", "prompt"],
)
def test_other_adapters_are_refused(config, code):
    with torch.device("meta"):
        model = get_peft_model(causal("llama"), config)
    report = shardplan.validate(model, "auto", {"tp": 2})
    assert {d.code for d in report.diagnostics} == {code} and all(d.help for d in report.diagnostics)


def test_a_rule_for_a_single_parameter_of_an_adapted_layer_is_refused():
    plan = {"version": "1", "tensor_parallel": {"model.layers.*.self_attn.q_proj.weight": "colwise"}}
    report = shardplan.validate(CASES["llama"].meta(), plan, {"tp": 2})
    assert "SP390" in {d.code for d in report.diagnostics if d.is_error}


def test_every_style_holds_every_part_of_an_adapter_or_refuses_it():
    """The table is total: where a weight is whole, an adapter is as the weight."""
    parts = [ParameterInfo("x", (4, 4), adapter=part) for part in ("A", "B", "embedding_A", "embedding_B", "magnitude")]
    for style in STYLES.values():
        held = {p.adapter: adapter_style(style, p) for p in parts}
        if style.weight in (WHOLE, WHOLE_PARTIAL):
            assert set(held.values()) == {style.weight}
        if style.weight.shard == "in" and not style.splits_rows:
            assert held["A"] == style.weight and held["B"] == WHOLE_PARTIAL and held["magnitude"] is None
        if style.splits_rows:
            assert held["embedding_A"] == DIVIDED and held["A"] is None
        if style.weight.shard == "out":
            assert held["B"] == style.weight and held["A"] == WHOLE_PARTIAL


# Rules see the names that the model has without adapters.


def test_a_plan_is_bound_as_to_the_model_without_adapters():
    plain = shardplan.compile_plan(small_model("llama"), {"tp": 2}, "auto", sequence_parallel=True).resolved
    model = get_peft_model(small_model("llama"), LoraConfig(target_modules=ALL))
    adapted = shardplan.compile_plan(model, {"tp": 2}, "auto", sequence_parallel=True).resolved
    assert {n: a.rule for n, a in adapted.assignments.items()} == {n: a.rule for n, a in plain.assignments.items()}
    assert adapted.dp_units == plain.dp_units and adapted.tree.class_names == plain.tree.class_names


def test_no_rule_reaches_into_an_adapter():
    plan = {"version": "1", "tensor_parallel": {"model.layers.*.self_attn.q_proj.lora_A.default": "replicate"}}
    report = shardplan.validate(CASES["llama"].meta(), plan, {"tp": 2})
    assert "SP201" in {d.code for d in report.diagnostics if d.is_error}


def test_a_copy_of_a_module_has_the_module_s_rule():
    model = CASES["llama, saved"].meta()
    program = shardplan.compile_plan(model, {"tp": 2}, "auto")
    for copied in ("lm_head.original_module", "lm_head.modules_to_save.default"):
        assert program.modules[copied].style == "colwise_gather_output"


def test_show_speaks_of_the_adapters(capsys):
    from shardplan.cli.main import main

    assert main(["show", "tests.test_adapters:shown", "auto", "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "lora_A.default.weight" in text and "model.layers.0-1.self_attn.q_proj" in text and "base_model" not in text


def test_validate_from_the_command_line(capsys):
    from shardplan.cli.main import main

    assert main(["validate", "tests.test_adapters:shown", "auto", "--tp", "2"]) == 0
    assert "no findings" in capsys.readouterr().out


def shown() -> PeftModel:
    return get_peft_model(
        AutoModelForCausalLM.from_config(small_config("llama")), LoraConfig(target_modules=["q_proj", "o_proj"])
    )


# Communication.


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_adapters_add_one_small_reduction_to_each_block(sp):
    """Forward there is no collective more than without adapters; backward one for each block, of all its partial
    gradients together."""

    def counted(model: nn.Module) -> list[CollectiveCounter]:
        planned(model, mesh, "llama", sequence_parallel=sp)
        with CollectiveCounter() as forward:
            loss = step(model, inputs)["loss"]
        with CollectiveCounter() as backward:
            loss.backward()
        return [forward, backward]

    inputs = reduced_model("llama", 2).inputs()
    with fake_mesh(2) as mesh:
        bare = AutoModelForCausalLM.from_config(reduced_model("llama", 2).config).requires_grad_(False)
        bare.model.embed_tokens.weight.requires_grad_(True)
        plain = counted(bare)
        adapted = counted(reduced_model("llama", 2).build())
    assert adapted[0].counts == plain[0].counts
    model = reduced_model("llama", 2).build()
    partial = [
        p.numel()
        for n, p in model.named_parameters()
        if p.requires_grad and (("lora_A" in n) != ("o_proj" in n or "down_proj" in n))
    ]
    grouped = [c.elements for c in adapted[1].calls if c.name == "all_reduce" and c.elements == sum(partial) // 2]
    assert len(grouped) == len(model.model.layers)
    rest = [c.name for c in adapted[1].calls]
    for _ in grouped:
        rest.remove("all_reduce")
    assert len(rest) <= len(plain[1].calls)


# Real processes.


@dataclass(frozen=True)
class AdaptedRecipe(Recipe):
    """As a Recipe, of a model that peft wraps."""

    targets: tuple[str, ...] = ()
    save: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        model = small_model(self.model, tied=self.tied, dtype=torch.float64)
        torch.manual_seed(1)
        config = LoraConfig(
            r=4,
            lora_alpha=128,
            target_modules=list(self.targets),
            modules_to_save=list(self.save) or None,
            init_lora_weights=False,
        )
        return get_peft_model(model, config, autocast_adapter_dtype=False).double()


TRAINED = {
    "llama": ((*ALL, "embed_tokens"), ()),
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), ("lm_head",)),
}


@pytest.mark.parametrize(
    ("model", "sp"),
    [
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("phi3", False, marks=pytest.mark.slow),
        pytest.param("llama", False, marks=pytest.mark.exhaustive),
        pytest.param("phi3", True, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.proves("tp sp fsdp2 checkpointing lora", "tp fsdp2 lora", "tp sp fsdp2 lora")
def test_training_with_fsdp2(model, sp):
    targets, save = TRAINED[model]
    options = {"activation_checkpointing": {"mode": "full"}} if sp else {}
    compare(AdaptedRecipe(model, TWO_BY_TWO, sequence_parallel=sp, targets=targets, save=save, options=options))


def mixed() -> float:
    """A base in bfloat16 with adapters that peft keeps in float32: one step, and the loss."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = get_peft_model(small_model("llama", dtype=torch.bfloat16), LoraConfig(r=4, target_modules=ALL))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, prove=False)
    ids = batch(0)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and bool(g.full_tensor().isfinite().all()) for g in gradients)
    return loss.item()


@pytest.mark.slow
def test_adapters_in_float32_on_a_base_in_bfloat16():
    ids = batch(0)
    loss = small_model("llama", dtype=torch.bfloat16)(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert on_ranks(4, mixed) == [pytest.approx(loss, rel=2e-2)] * 4


def saved(folder: str) -> None:
    """peft's own functions, on a sharded model: what they save is what the unsharded model would."""
    recipe = AdaptedRecipe("phi3", TWO_BY_TWO, targets=("qkv_proj", "o_proj"), save=("lm_head",))
    model = recipe.build()
    expected = {n: v.clone() for n, v in peft.get_peft_model_state_dict(model).items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    keys = list(model.state_dict())
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, prove=False)
    assert list(model.state_dict()) == keys
    state = peft.get_peft_model_state_dict(model)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), expected[name]), name
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        empty = recipe.build()
    shardplan.apply_plan(empty, mesh, "auto", sequence_parallel=True, prove=False)
    with pytest.raises(ValueError, match="adapters"):
        shardplan.materialize(empty, "cpu")
    shardplan.materialize(empty, "cpu", state_dict=whole)
    for name, value in whole_state(empty).items():
        assert torch.equal(value, whole[name]), name
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)


@pytest.mark.slow
def test_peft_saves_what_the_unsharded_model_would(tmp_path):
    on_ranks(4, saved, str(tmp_path))
    model = AdaptedRecipe("phi3", TWO_BY_TWO, targets=("qkv_proj", "o_proj"), save=("lm_head",)).build()
    fresh = PeftModel.from_pretrained(small_model("phi3", dtype=torch.float64), tmp_path, autocast_adapter_dtype=False)
    expected = peft.get_peft_model_state_dict(model)
    for name, value in peft.get_peft_model_state_dict(fresh).items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
