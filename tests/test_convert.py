"""`convert_plan`: plans of transformers, NeMo Automodel, NeMo-RL, torch and DeepSpeed as plans of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import peft
import pytest
from small_models import small_model
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers.distributed import DistributedConfig

from shardplan import Model, PlanError, validate
from shardplan.compiler.bind import bind
from shardplan.compiler.bind.matching import Names
from shardplan.convert import convert_plan, converting
from shardplan.convert.foreign_places import Places
from shardplan.convert.regexes import NoGlob, globs_of
from shardplan.core.diagnostics import Diagnostic, Location
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Rule, overlays_of
from shardplan.language import parse_plan, parse_text
from shardplan.language.globs import parse_glob
from shardplan.model import find_model, tree_of
from tests import foreign_plans as foreign
from tests.expert_runs import config_of
from tests.proofs import assert_equal, case

WHOLE, SLICE, FEATURES = Replicate(), Shard(1), Shard(-1)

DEFAULTS = Rule("", "", Location("")).options


def rules(text: str | None, section: str = "tensor_parallel") -> dict[str, tuple[str, dict[str, Any]]]:
    """What each pattern of a plan says: braces opened, options that are stated."""
    assert text is not None
    plan = parse_text(text, file="<text>").plan
    assert plan is not None, text
    return {
        pattern: (rule.style, {k: v for k, v in rule.options.items() if v != DEFAULTS[k]})
        for rule in getattr(plan, section)
        for pattern in parse_glob(rule.pattern).texts
    }


def styles(text: str | None, section: str = "tensor_parallel") -> dict[str, str]:
    return {pattern: style for pattern, (style, _) in rules(text, section).items()}


class Made(NamedTuple):
    text: str | None
    document: Mapping[str, Any] | None
    diagnostics: tuple[Diagnostic, ...]


def convert(source: Any, *, form: Any = None, import_path: Any = None, found: Any = None, name: Any = None) -> Made:
    """A conversion for a model, without validating the plan."""
    try:
        return Made(*converting._converted(converting._read(source, import_path, found), form, found, name))
    except PlanError as error:
        return Made(None, None, error.diagnostics)


def said(source: Mapping[str, Any], **options: Any) -> list[tuple[str, str]]:
    """The findings about a source that is converted without a model."""
    made = convert_plan(source, **options)
    return [(d.code, d.message) for d in made.report.diagnostics]


# --- there and back: the built-in plans in torch's styles -----------------------------------------------------------------


def torch_style(style: str, options: Mapping[str, Any]) -> ParallelStyle | str | None:
    """torch's style for one of ours, as a person would write it; None where torch has none, for a block input that torch's styles
    have in themselves."""
    if style == "sequence_parallel" and options["output"] == "gather":
        return foreign.SequenceParallelAllGatherActivation()
    if style == "gather_seq_input" and options["output"] is None:
        name = options["argument"]
        if name is not None:
            return PrepareModuleInput(input_kwarg_layouts={name: SLICE}, desired_input_kwarg_layouts={name: WHOLE})
    simple: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_seq": ColwiseParallel(input_layouts=SLICE),
        "colwise_gather_output": ColwiseParallel(output_layouts=WHOLE),
        "colwise_seq_gather_output": ColwiseParallel(input_layouts=SLICE, output_layouts=WHOLE),
        "colwise_vocab": ColwiseParallel(use_local_output=False),
        "rowwise": RowwiseParallel(),
        "rowwise_seq": RowwiseParallel(output_layouts=SLICE),
        "rowwise_split_input": RowwiseParallel(input_layouts=WHOLE),
        "embedding_rowwise": RowwiseParallel(input_layouts=WHOLE),
        "embedding_rowwise_seq": RowwiseParallel(input_layouts=WHOLE, output_layouts=SLICE),
        "embedding_colwise": ColwiseParallel(output_layouts=WHOLE),
        "sequence_parallel": SequenceParallel(),
        "gather_seq_input": PrepareModuleInput(input_layouts=SLICE, desired_input_layouts=WHOLE),
        "split_seq_input": PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=SLICE),
        "all_reduce": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=WHOLE),
        "reduce_scatter": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=SLICE),
        "replicated_with_grad_allreduce": foreign.Qwen3QKNorm(),
    }
    return simple[style]


# Plans all of whose styles torch can say, one for each form of model among them.
DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi", "starcoder2"]


@pytest.mark.parametrize("name", DENSE)
def test_there_and_back(name: str) -> None:
    """A built-in plan in torch's styles, without and with sequence parallelism, comes back as the same rules."""
    found = find_model(name, overrides={"num_hidden_layers": 2})
    plan = parse_plan(name).plan
    assert plan is not None

    def bound(read: Any, on: bool) -> dict[str, tuple[str, dict[str, Any]]]:
        resolved, _ = bind(read, found.tree, MeshSizes(tp=2), overlays_of(on))
        return {
            module: (a.rule.style, a.rule.options)
            for module, a in resolved.assignments.items()
            if a.rule.style not in ("input_with_grad_allreduce", "replicate")
        }

    for on in (False, True) if plan.has_overlay else (False,):
        wanted = bound(plan, on)
        source = {module: torch_style(*rule) for module, rule in wanted.items()}
        made = convert(source, form="torch", found=found)
        assert made.text is not None, made.diagnostics
        assert bound(parse_text(made.text, file="<text>").plan, on) == wanted


# --- transformers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "qwen3", "mixtral", "gemma3_text"])
def test_transformers_own_plan(model: str) -> None:
    made = convert_plan("hf", model=Model(model, {"num_hidden_layers": 2}))
    assert made.ok and made.report.diagnostics == ()
    found = find_model(model, overrides={"num_hidden_layers": 2})
    names = Names(found.tree)
    theirs = {
        name: style
        for pattern, style in found.build().tp_plan.items()
        for reached in [names.reach(parse_glob(pattern))]
        for name in (*reached.modules, *reached.parameters)
    }
    resolved, _ = bind(parse_text(made.text, file="<text>").plan, found.tree, MeshSizes(tp=2))
    assert {name: a.rule.style for name, a in resolved.assignments.items()} == theirs


def test_qwen3_without_its_head_norms() -> None:
    """The plan of a Llama, and of an older transformers, on Qwen3: right losses, wrong gradients."""
    made = convert_plan(foreign.NAMES, model=Model("qwen3", {"num_hidden_layers": 2}), shown_as="plan.yaml")
    assert not made.ok and made.text is not None
    (finding,) = made.report.diagnostics
    assert finding.code == "SP401" and finding.help is not None
    assert finding.help.startswith("add `model.layers.*.self_attn.{q,k}_norm: replicated_with_grad_allreduce`")
    assert finding.primary is not None and finding.primary.location.file == "plan.yaml"
    assert "model.layers.*.self_attn.{q,k,v}_proj: colwise" in made.text


@pytest.mark.parametrize(
    ("function", "name", "settings"),
    [("qwen", "qwen3", {}), ("gemma3", "gemma3_text", {}), ("phi", "phi", {"qk_layernorm": True})],
)
def test_the_plans_of_nemo_automodel(function: str, name: str, settings: dict[str, Any]) -> None:
    """Where it is installed, which `make test` does not ask for: 0.7.0 was, when this was written."""
    pytest.importorskip("nemo_automodel")
    path = f"nemo_automodel.components.distributed.optimized_tp_plans:_parallelize_{function}"
    made = convert_plan(import_path=path, model=Model(name, {"num_hidden_layers": 2, **settings}))
    assert made.ok, made.report
    found = re.search(r"self_attn\.\{q,k\}_(layer)?norm: replicated_with_grad_allreduce$", str(made.text), re.MULTILINE)
    assert found, made.text


def test_a_plan_without_the_base_models_name() -> None:
    source = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "lm_head": "colwise_rep"}
    found = find_model("llama", overrides={"num_hidden_layers": 2})
    made = convert(source, found=found)
    assert styles(made.text) == {
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
    # torch reads names as they are: nothing is completed for it.
    other = convert({k: ColwiseParallel() for k in source}, found=found)
    assert styles(other.text) == {"lm_head": "colwise"}
    assert [d.code for d in other.diagnostics] == ["SP545", "SP545"]


# --- NeMo Automodel, NeMo-RL, torchtitan -----------------------------------------------------------------------------------

SP_OF_LLAMA = {
    "model.embed_tokens": ("embedding_rowwise_seq", {}),
    "model.layers.0": ("split_seq_input", {}),
    foreign.O_PROJ: ("rowwise_seq", {}),
    foreign.DOWN: ("rowwise_seq", {}),
    "model.norm": ("sequence_parallel", {"output": "gather"}),
}
DOORS = {"model.layers.*.self_attn": ("gather_seq_input", {}), "model.layers.*.mlp": ("gather_seq_input", {})}
TP_OF_LLAMA = {
    "model.embed_tokens": "embedding_rowwise",
    **dict.fromkeys((*foreign.QKV, *foreign.UP), "colwise"),
    foreign.O_PROJ: "rowwise",
    foreign.DOWN: "rowwise",
    "lm_head": "colwise_vocab",
}


def test_automodels_function_for_llama() -> None:
    made = convert_plan(import_path="tests.foreign_plans:automodel_llama", model="llama")
    assert made.ok, made.report
    assert [d.code for d in made.report.diagnostics] == ["SP545", "SP545"], "the fused names"
    assert made.report.variants == ("tensor_parallel", "sequence_parallel")
    assert styles(made.text) == TP_OF_LLAMA
    gathering = {norm: ("sequence_parallel", {"output": "gather"}) for norm in foreign.NORMS}
    assert rules(made.text, "sequence_parallel") == SP_OF_LLAMA | gathering
    assert "sequence-parallel form alone" not in str(made.text)
    read = parse_plan(dict(made.document or {}), name="said").plan
    assert read is not None and read.name == "llama", "the document says the same"
    # The dictionary with sequence parallelism alone: the other section follows from it, and the file says so.
    found = find_model("llama")
    alone = convert(foreign.AUTOMODEL_SP, found=found)
    assert "sequence-parallel form alone" in str(alone.text)
    assert rules(alone.text) == rules(made.text)
    assert rules(alone.text, "sequence_parallel") == rules(made.text, "sequence_parallel")


def test_nemo_rls_older_form_for_qwen3() -> None:
    made = convert_plan(import_path="tests.foreign_plans.nemo_rl_qwen3", model="qwen3")
    assert made.ok, made.report
    assert sorted(d.code for d in made.report.diagnostics) == ["SP545"] * 3 + ["SP546"]
    head_norms = {f"model.layers.*.self_attn.{n}_norm": "replicated_with_grad_allreduce" for n in "qk"}
    assert styles(made.text) == TP_OF_LLAMA | head_norms
    norms = {norm: ("sequence_parallel", {}) for norm in foreign.NORMS}
    assert rules(made.text, "sequence_parallel") == SP_OF_LLAMA | norms | DOORS


def test_torchtitans_form() -> None:
    found = find_model("llama", overrides={"num_hidden_layers": 2})
    made = convert(foreign.torchtitan_llama(), found=found)
    assert made.diagnostics == ()
    norms = {norm: ("sequence_parallel", {}) for norm in foreign.NORMS}
    attention = {"model.layers.*.self_attn": ("gather_seq_input", {"argument": "hidden_states"})}
    assert rules(made.text, "sequence_parallel") == SP_OF_LLAMA | norms | DOORS | attention
    assert styles(made.text) == TP_OF_LLAMA | {"lm_head": "colwise_gather_output"}


@pytest.mark.slow  # many changes are tried before none is proposed
def test_slices_as_local_tensors_are_not_gathered() -> None:
    """With `use_local_output=True` the matrices would multiply slices as if they were whole: torch computes that, and the
    plan that says it is refused."""
    plan = foreign.nemo_rl_qwen3() | {name: SequenceParallel(use_local_output=True) for name in foreign.NORMS}
    made = convert_plan(plan, model=Model("qwen3", {"num_hidden_layers": 2}))
    assert "SP402" in [d.code for d in made.report.errors] and made.text is not None


def test_styles_by_name_of_automodel() -> None:
    made = convert(foreign.NAMES, form="automodel", found=find_model("llama"), name="mine")
    assert styles(made.text) == TP_OF_LLAMA | {"lm_head": "colwise_gather_output"}
    assert "name: mine" in str(made.text) and made.diagnostics == ()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests.foreign_plans:nothing", "has no nothing"),
        ("no_such_module:plan", "cannot be imported: ModuleNotFoundError"),
        ("plan", "names nothing to import"),
        ("tests.foreign_plans:EMPTY", "an empty dictionary"),
        ("tests.foreign_plans:QKV", "a list, not a dictionary"),
        ("tests.foreign_plans:raises", "raised RuntimeError: no plan today"),
    ],
)
def test_imports_that_give_nothing(path: str, reason: str) -> None:
    made = convert_plan(import_path=path)
    (finding,) = made.report.diagnostics
    assert finding.code == "SP547" and reason in finding.message and made.text is None


def test_a_function_that_wants_more() -> None:
    assert [d.code for d in convert_plan(import_path="tests.foreign_plans:takes_more").report.errors] == ["SP544"]
    found = find_model("llama", overrides={"num_hidden_layers": 1})
    made = convert(None, form=None, import_path="tests.foreign_plans:takes_more", found=found, name=None)
    assert "tp_size" in made.diagnostics[0].message


# --- layouts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "whole", "sliced"),
    [
        (ColwiseParallel(), {"style": "colwise"}, None),
        (ColwiseParallel(output_layouts=WHOLE), {"style": "colwise_gather_output"}, None),
        (ColwiseParallel(input_layouts=SLICE), {"style": "colwise"}, {"style": "colwise_seq"}),
        (ColwiseParallel(input_layouts=Shard(0)), {"style": "colwise"}, {"style": "colwise_seq", "seq_dim": 0}),
        (
            ColwiseParallel(input_layouts=SLICE, output_layouts=WHOLE),
            {"style": "colwise_gather_output"},
            {"style": "colwise_seq_gather_output"},
        ),
        (RowwiseParallel(), {"style": "rowwise"}, None),
        (RowwiseParallel(output_layouts=SLICE), {"style": "rowwise"}, {"style": "rowwise_seq"}),
        (SequenceParallel(), None, {"style": "sequence_parallel"}),
        (foreign.Qwen3QKNorm(), {"style": "replicated_with_grad_allreduce"}, None),
        pytest.param(
            foreign.ReplicatedWithGradAllReduce(),
            {"style": "replicated_with_grad_allreduce"},
            None,
            id="gradients alone",
        ),
        (
            PrepareModuleInput(input_layouts=(SLICE, None), desired_input_layouts=(WHOLE, None)),
            None,
            {"style": "gather_seq_input"},
        ),
        (
            PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=SLICE),
            None,
            {"style": "split_seq_input"},
        ),
        (
            PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=SLICE),
            {"style": "all_reduce"},
            {"style": "reduce_scatter"},
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=SLICE,
                desired_input_layouts=WHOLE,
                output_layouts=Partial(),
                desired_output_layouts=SLICE,
            ),
            {"style": "all_reduce"},
            {"style": "gather_seq_input", "output": "reduce_scatter"},
        ),
    ],
    ids=repr,
)
def test_what_layouts_mean(style: ParallelStyle, whole: Any, sliced: Any) -> None:
    """A rule of each section (None: there is none)."""
    made = convert({"blocks.*.part": style}, found=None)
    assert made.diagnostics == () and made.document is not None
    for section, wanted in (("tensor_parallel", whole), ("sequence_parallel", sliced)):
        found = made.document.get(section, {}).get("blocks.*.part")
        assert found == (wanted["style"] if wanted and len(wanted) == 1 else wanted)


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(output_layouts=SLICE),
        ColwiseParallel(input_layouts=FEATURES),
        ColwiseParallel(output_layouts=Shard(2)),
        RowwiseParallel(input_layouts=SLICE),
        RowwiseParallel(output_layouts=FEATURES),
        RowwiseParallel(input_layouts=Shard(0), output_layouts=SLICE),
        SequenceParallel(sequence_dim=2),
        PrepareModuleInput(input_layouts=FEATURES, desired_input_layouts=WHOLE),
        PrepareModuleInput(input_layouts=(None, SLICE), desired_input_layouts=(None, WHOLE)),
        PrepareModuleInput(input_layouts=(SLICE, SLICE), desired_input_layouts=(WHOLE, WHOLE)),
        PrepareModuleOutput(output_layouts=SLICE, desired_output_layouts=WHOLE),
        PrepareModuleOutput(output_layouts=Partial("max"), desired_output_layouts=WHOLE),
    ],
    ids=repr,
)
def test_layouts_that_no_style_means(style: ParallelStyle) -> None:
    made = convert_plan({"blocks.*.part": style, "blocks.*.other": ColwiseParallel()})
    assert [d.code for d in made.report.diagnostics] == ["SP542"] and made.text is None
    assert made.report.diagnostics[0].primary is not None
    assert made.report.diagnostics[0].primary.location.path == ("blocks.*.part",)


def test_embeddings_and_linear_layers_are_told_apart_by_the_model() -> None:
    whole = RowwiseParallel(input_layouts=WHOLE)
    assert [code for code, _ in said({"embed": whole})] == ["SP544"]
    found = find_model("llama", overrides={"num_hidden_layers": 1})
    source = {"model.embed_tokens": whole, foreign.O_PROJ: whole}
    made = convert(source, found=found)
    assert styles(made.text) == {"model.embed_tokens": "embedding_rowwise", foreign.O_PROJ: "rowwise_split_input"}
    for wrong in (ColwiseParallel(), RowwiseParallel()):
        made = convert({"model.embed_tokens": wrong}, found=found)
        assert [d.code for d in made.diagnostics] == ["SP542"]
    made = convert({"model.*": whole}, found=found)
    assert [d.code for d in made.diagnostics] == ["SP542"] * 2, "a norm and a list"


def test_two_entries_for_one_module() -> None:
    found = find_model("llama", overrides={"num_hidden_layers": 2})
    source = {"model.layers.*.mlp.*_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    made = convert(source, found=found)
    assert [d.code for d in made.diagnostics] == ["SP548"] and made.text is None
    again = {"model.layers.*.mlp.*_proj": "colwise", "model.layers.*.mlp.down_proj": "colwise"}
    assert convert(again, found=found).text is not None


def test_layers_that_are_listed_one_by_one() -> None:
    found = find_model("llama", overrides={"num_hidden_layers": 3})
    source = {
        name.replace("*", str(layer)): style for layer in range(3) for name, style in foreign.torchtitan_llama().items()
    }
    source["model.layers.1.mlp.gate_proj"] = ColwiseParallel(output_layouts=WHOLE)
    made = convert(source, found=found)
    assert made.diagnostics == ()
    whole = styles(made.text)
    one = {f"model.layers.{layer}.mlp.gate_proj": "colwise" for layer in (0, 2)}
    one["model.layers.1.mlp.gate_proj"] = "colwise_gather_output"
    wanted = TP_OF_LLAMA | {"lm_head": "colwise_gather_output"} | one
    wanted.pop("model.layers.*.mlp.gate_proj")
    assert whole == wanted
    assert "model.layers.0" in rules(made.text, "sequence_parallel")


EXPERTS = "layers.*.mlp.experts"
EP_PLAN = {
    f"{EXPERTS}.gate_up_proj": "grouped_gemm",
    f"{EXPERTS}.down_proj": "grouped_gemm",
    EXPERTS: "ep_dispatch_experts",
}


def test_experts_that_are_distributed() -> None:
    made = convert_plan(EP_PLAN | {"norm": "replicate"})
    assert not made.report.diagnostics and styles(made.text) == {"norm": "replicate"}
    assert rules(made.text, "expert_parallel") == {EXPERTS: ("ep_dispatch", {})}
    norm = {f"{EXPERTS}.post_expert_norm": "replicated_with_grad_allreduce"}  # shared by all experts, it goes with them
    assert convert_plan(EP_PLAN | norm).document == convert_plan(EP_PLAN).document
    older = EP_PLAN | {EXPERTS: "moe_tp_experts", "layers.*.mlp.gate": "ep_router"}
    made = convert_plan(older)
    assert rules(made.text, "expert_parallel") == {EXPERTS: ("ep_experts", {"output": "all_reduce"})}
    assert [(d.code, d.severity) for d in made.report.diagnostics] == [("SP545", "warning")]
    stacks = {name: style for name, style in EP_PLAN.items() if style == "grouped_gemm"}
    assert [code for code, _ in said(stacks)] == ["SP541"]
    assert "has no entry: experts are distributed by module" in said(stacks)[0][1]


@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_plans_of_transformers_for_experts(model: str) -> None:
    config = config_of(model)
    alone = convert_plan(config.base_model_ep_plan, model=config)
    both = convert_plan("hf", model=config)
    for made in (alone, both):
        assert not made.report.diagnostics
        assert styles(made.text, "expert_parallel") == {"model.layers.*.mlp.experts": "ep_dispatch"}
        assert made.document["data_parallel"]["units"] == ["model.layers.*"]
    assert not styles(alone.text) and styles(both.text)["lm_head"] == "colwise_gather_output"
    report = validate(config, both.document, {"tp": 2, "dp_shard": 2, "ep": 4})
    assert report.ok and not report.diagnostics, report


def test_unknown_styles() -> None:
    wrong = {"a": "colwise_wrong", "b": foreign.MyOwn(), "c": 3, "d": "local_rowwise", "e": "none", "f": ["colwise"]}
    messages = said({**wrong, "g": ColwiseParallel()})
    assert [code for code, _ in messages] == ["SP541"] * 6
    assert "MyOwn is an unknown class" in messages[1][1] and "holds by itself" in messages[3][1]


def test_keys_that_are_no_globs() -> None:
    wrong = {"": "colwise", "a,b": "colwise", "a.{q,k}": "colwise", "a..b": "colwise", "a/b": "colwise"}
    assert [code for code, _ in said(wrong)] == ["SP543"] * 5
    made = convert_plan({"a.**.b": "colwise", "c[0-9]": "rowwise"})
    assert styles(made.text) == {"a.*.b": "colwise", "c[0-9]": "rowwise"}, "two stars are one part there too"


def test_an_entrance_that_cannot_be_told() -> None:
    split = RowwiseParallel(input_layouts=WHOLE, output_layouts=SLICE)
    assert [code for code, _ in said({"embed": split, "norm": SequenceParallel()})] == ["SP542"]
    two = {"embed": split, "a.*.norm": SequenceParallel(), "b.*.norm": SequenceParallel()}
    assert [code for code, _ in said(two)] == ["SP542"]
    head = ColwiseParallel(input_layouts=SLICE, use_local_output=False)
    assert [code for code, _ in said({"head": head, "a.*.norm": SequenceParallel()})] == ["SP542"], "no norm in front"


# --- DeepSpeed -------------------------------------------------------------------------------------------------------------


def specs(*specs: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"layer_specs": list(specs), **more}


def test_a_distributed_config_is_read_whole(tmp_path: Path) -> None:
    """As an object, a dictionary and JSON: what it says instead of the model's own plans, what it wraps, and the sizes."""
    moe = Model("qwen3_moe", {"num_hidden_layers": 2})
    words = {
        "tp_size": 2, "fsdp_size": 4, "ep_size": 2, "tp_plan": {"lm_head": "colwise"}, "fsdp_cpu_offload": True,
        "fsdp_mixed_precision": True, "ep_implementation": "all_reduce",
    }  # fmt: skip
    config = DistributedConfig(**words)
    config.to_json_file(tmp_path / "config.json")
    made = [convert_plan(source, model=moe) for source in (config, words, tmp_path / "config.json")]
    assert len({one.text for one in made}) == 1 and made[0].text is not None, made[0].report
    plan = made[0].document
    assert plan["tensor_parallel"]["lm_head"] == "colwise"  # and the rest is the model's own
    own = convert_plan("hf", model=moe).document
    assert {**plan["tensor_parallel"], "lm_head": None} == {**own["tensor_parallel"], "lm_head": None}
    assert plan["expert_parallel"] == {"model.layers.*.mlp.experts": {"style": "ep_experts", "output": "all_reduce"}}
    assert plan["data_parallel"] == {
        "backend": "fsdp2", "units": ["model.embed_tokens", "model.layers.*"], "reshard_after_forward": True,
        "cpu_offload": "pinned", "mixed_precision": {"param": "bfloat16", "reduce": "float32"},
    }  # fmt: skip
    assert "build_mesh(dp_shard=4, tp=2, ep=2)" in made[0].text
    assert all("SP542" not in str(one.report) for one in made)


CONFIGS: list[tuple[Any, list[str], dict[str, Any] | None]] = [
    # A config that splits nothing wraps.
    ({"fsdp_size": 2, "tp_plan": {}}, [], {"data_parallel"}),
    ({"fsdp_size": 2, "fsdp_plan": {"model.layers.*": "keep_full_weight"}}, ["SP546"], {"data_parallel"}),
    ({"tp_plan": "auto"}, [], {"tensor_parallel", "data_parallel"}),
    ({"tp_size": 2, "ep_plan": {}}, ["SP545"], {"tensor_parallel", "data_parallel"}),
    ({"tp_size": 2, "enable_sequence_parallel": True}, ["SP545"], {"tensor_parallel", "data_parallel"}),
    ({"tp_size": 2, "pp_size": 2, "pp_plan": {}}, ["SP545", "SP545"], {"tensor_parallel", "data_parallel"}),
    ({"tp_size": 2, "rows": 3}, ["SP545"], {"tensor_parallel", "data_parallel"}),
    ({"tp_size": 0}, ["SP540"], None),
    ({"tp_plan": "all"}, ["SP540"], None),
    ({"tp_size": 2, "ep_implementation": "mine"}, ["SP540"], None),
    ({"fsdp_size": 2, "fsdp_plan": {"model.layers.*": "full"}}, ["SP542"], None),
    ({"tp_size": 1}, ["SP540"], None),
]


@pytest.mark.parametrize(
    ("config", "codes", "sections"), CONFIGS, ids=lambda case: str(sorted(case) if isinstance(case, set) else case)[:60]
)
def test_words_of_a_distributed_config(config: dict[str, Any], codes: list[str], sections: set[str] | None) -> None:
    made = convert_plan(config, model=Model("llama", {"num_hidden_layers": 2}))
    assert [str(d.code) for d in made.report.diagnostics] == codes, made.report
    assert (made.document is None) == (sections is None)
    if sections is not None:
        assert {name for name in made.document if name.endswith("parallel")} == sections


def test_a_distributed_config_needs_the_model_whose_plans_it_changes() -> None:
    assert [d.code for d in convert_plan({"tp_size": 2}).report.diagnostics] == ["SP544"]
    (found,) = convert_plan({"tp_size": 2}, form="torch", model=Model("llama")).report.diagnostics
    assert found.code == "SP540" and "this is a DistributedConfig of transformers" in found.message
    tied = Model("llama", {"num_hidden_layers": 2, "tie_word_embeddings": True})
    made = convert_plan({"fsdp_size": 2}, model=tied)  # one unit holds what is tied: the root
    assert made.ok and made.document["data_parallel"]["units"] == ["model.layers.*"], made.report


def test_words_of_deepspeed_0_19() -> None:
    """What is split, or a warning for each."""
    source = {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "tensor_parallel": {
            "vocab_parallel_lm_head": True,
            "partition_config": {
                **foreign.DEEPSPEED["tensor_parallel"]["partition_config"],
                "strict_mode": True,
                "embedding_partition_dim": 0,
                "lm_head_patterns": ["lm_head"],
                "rows": 2,
            },
        },
    }
    norms = {"patterns": [".*\\.[qk]_norm\\.weight$"], "partition_type": "skip", "grad_allreduce": True}
    config = source["tensor_parallel"]["partition_config"]
    config["layer_specs"] = [norms, *config["layer_specs"]]
    made = convert_plan(source, model=Model("qwen3", {"num_hidden_layers": 2}))
    assert made.ok, made.report
    for name in "qk":
        assert (
            made.document["tensor_parallel"][f"model.layers.*.self_attn.{name}_norm"]
            == "replicated_with_grad_allreduce"
        )
    places = [d.primary.location.path for d in made.report.diagnostics if d.code == "SP545"]
    wanted = ["strict_mode", "embedding_partition_dim", "lm_head_patterns", "rows"]
    assert {path[-1] for path in places} >= {*wanted, "vocab_parallel_lm_head", "expert_parallel"}
    assert "DeepSpeed refuses it: `lm_head`" in str(made.report)
    norms["partition_type"] = "column"
    assert "SP542" in str(convert_plan(source, model=Model("qwen3", {"num_hidden_layers": 2})).report)


def test_deepspeeds_llama() -> None:
    made = convert_plan(foreign.DEEPSPEED, model=Model("llama", {"num_hidden_layers": 2}))
    assert made.ok and made.report.diagnostics == ()
    wanted = {name: style for name, style in TP_OF_LLAMA.items() if "layers" in name}
    assert styles(made.text) == wanted
    without = convert_plan(foreign.DEEPSPEED)
    found = find_model("llama", overrides={"num_hidden_layers": 2})
    resolved, findings = bind(parse_text(str(without.text), file="<text>").plan, found.tree, MeshSizes(tp=2))
    theirs, _ = bind(parse_text(str(made.text), file="<text>").plan, found.tree, MeshSizes(tp=2))
    assert not findings
    assert {n: a.rule.style for n, a in resolved.assignments.items()} == {
        n: a.rule.style for n, a in theirs.assignments.items()
    }


def test_the_first_spec_holds_and_skip_takes_out() -> None:
    found = find_model("llama", overrides={"num_hidden_layers": 2})
    source = specs(
        {"patterns": [r".*layers\.1\.mlp\..*$"], "partition_type": "skip"},
        {"patterns": [r".*\.down_proj\.weight"], "partition_type": "row"},
        {"patterns": [r".*\.mlp\.[a-z]+_proj\.weight$", r"model\.layers\.\d+\.mlp\..*"]},
        {"patterns": [r"lm_head"], "gather_output": True},
    )
    made = convert(source, found=found)
    assert [d.code for d in made.diagnostics] == ["SP543"], "[a-z]+ has no glob"
    source["layer_specs"][2]["patterns"].pop(0)
    made = convert(source, found=found)
    assert made.diagnostics == ()
    assert styles(made.text) == {
        "model.layers.0.mlp.down_proj": "rowwise",
        "model.layers.0.mlp.gate_proj": "colwise",
        "model.layers.0.mlp.up_proj": "colwise",
        "lm_head": "colwise_gather_output",
    }
    assert [d.code for d in convert_plan(source).report.diagnostics] == ["SP544"]


def test_what_dtensor_gathers_where_it_is_cut_is_packed() -> None:
    """NeMo Automodel's plan for Phi-3 trains right with DTensors; as local slices gate and up would be mixed."""
    made = convert_plan(import_path="tests.foreign_plans:automodel_phi3", model="phi3", tp=2)
    assert made.ok, made.report
    assert rules(made.text) == {
        "model.embed_tokens": ("embedding_rowwise", {}),
        "model.layers.*.self_attn.qkv_proj": ("rowwise_split_input", {}),
        "model.layers.*.self_attn.o_proj": ("colwise_gather_output", {}),
        "model.layers.*.mlp.gate_up_proj": ("packed_colwise", {"packed": 2}),
        "model.layers.*.mlp.down_proj": ("rowwise", {}),
        "lm_head": ("colwise_vocab", {}),
    }
    (told,) = [d for d in made.report.diagnostics if d.code == "SP546"]
    assert not told.is_error and "cuts it into 2 parts" in told.message
    assert_equal(case("phi3", 2, plan=made.document).rows())


def test_packed_parts_and_model_types() -> None:
    found = find_model("phi3", overrides={"num_hidden_layers": 2})
    source = specs(
        {"patterns": [r".*\.qkv_proj\.weight$"], "shape": [[3072, 3072, 3072], -1], "partition_dim": 0},
        {"patterns": [r".*\.gate_up_proj\.weight$"], "shape": [2, -1], "model_types": ["PHI3"]},
        {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row", "model_types": ["llama"]},
        {"patterns": [r".*\.o_proj$"], "partition_type": "row"},
    )
    made = convert(source, found=found)
    assert rules(made.text) == {
        "model.layers.*.self_attn.qkv_proj": ("packed_colwise", {"packed": ("3072", "3072", "3072")}),
        "model.layers.*.mlp.gate_up_proj": ("packed_colwise", {"packed": 2}),
    }
    assert [(d.code, d.is_error) for d in made.diagnostics] == [("SP545", False)] * 2
    assert [code for code, _ in said(source)] == ["SP544", "SP544", "SP545"]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (specs({"patterns": ["a.weight"], "partition_type": "row", "partition_dim": 0}), "SP542"),
        (specs({"patterns": ["a.weight"], "partition_type": "row", "gather_output": True}), "SP542"),
        (specs({"patterns": ["a.weight"], "shape": [8, -1, 64], "partition_dim": 1}), "SP542"),
        (specs({"patterns": ["a.weight"], "shape": [1, -1]}), "SP542"),
        (specs({"patterns": ["a.weight"], "shape": [2, -1], "gather_output": True}), "SP542"),
        (specs({"patterns": ["a.weight"], "partition_type": "diagonal"}), "SP541"),
        (specs({"patterns": [r"(?<!b)a\.weight"]}), "SP543"),
        (specs({"patterns": [3]}), "SP543"),
        (specs({"pattern": "a.weight"}), "SP540"),
        (specs({"patterns": ["a.weight"], "dim": 0}), "SP540"),
        ({"tensor_parallel": {"autotp_size": 4, "preset_model": "llama"}}, "SP540"),
        ({"tensor_parallel": {"preset_model": "llama", "partition_config": specs({"patterns": ["a"]})}}, "SP540"),
        (specs(), "SP540"),
        ({"a": 1}, "SP540"),
        ({}, "SP540"),
    ],
    ids=str,
)
def test_what_cannot_be_said(source: dict[str, Any], code: str) -> None:
    made = convert_plan(source)
    assert [d.code for d in made.report.errors] == [code] and made.text is None


NAMES = [
    *("a", "o_proj", "x.o_proj", "model.layers.0.o_proj", "model.layers.12.self_attn.q_proj", "m.layers.1.k_proj"),
    *("model.layers.x1.mlp.up_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.gate_proj"),
    *("model.layers.0.o_proj2", "model.layers.0.o_proj.base", "aXb", "a.b", "axb.c", "encoder.layers.3.attn.o_proj"),
]
EXPRESSIONS = [
    *(r".*\.o_proj\.weight$", r".*\.o_proj\.weight", r".*o_proj\.weight$", r".*\.o_proj", r".*o_proj", r"o_proj"),
    *(r".*\.[qkv]_proj\.weight$", r".*\.(q|k|v)_proj\.weight$", r".*\.mlp\.(?:up|gate)_proj\.weight$"),
    *(r"model\.layers\.\d+\..*\.weight$", r"model\.layers\.[0-9]+\.o_proj\.weight$", r".*\.weight$", r".*", ""),
    *(
        r"model\.layers\.[^.]+\.mlp\.[^.]*\.weight$",
        r"a.b\.weight$",
        r"^model\..*proj\.weight$",
        r".*layers.*proj\.weight$",
    ),
    *(r".*\.mlp\.(gate_)?up_proj\.weight$", r"(model|encoder)\.layers\.\d\.attn\.o_proj\.weight$", r"m.*\.weight$"),
    *(r".*\.o_proj\.weight$|.*\.up_proj\.weight$", r".*\.o_proj$", r"model.layers.0.o_proj.weight", r"a[X-Z]b\.weight"),
    *(
        r"model\.layers\..*",
        r".*\.mlp\.[^.]+$",
        r".*\.w",
        r".*(o_proj\.weight|up_proj\.weight)$",
        r"(a|x\.o_proj)\.weight$",
    ),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_glob_matches_what_the_expression_matches(expression: str) -> None:
    globs = [parse_glob(glob) for glob in globs_of(expression)]
    matched = [name for name in NAMES if re.match(expression, f"{name}.weight")]
    assert [name for name in NAMES if any(glob.matches(name) for glob in globs)] == matched


@pytest.mark.parametrize(
    "expression",
    [
        *(r"a+\.weight", r"(?=a)b", r"\w+\.weight", r"a{2}", r".+\.weight", r"[^a]b", r"(a)\1", r"a\.weight$b"),
        *(r"(a", r"a)", r"[a", r"a*?", r".*?\.weight", r"(a$|b)\.weight", r"a^b", "a\\", "model.layers."),
    ],
)
def test_expressions_without_a_glob(expression: str) -> None:
    with pytest.raises(NoGlob):
        globs_of(expression)


# --- sources ---------------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    plan = tmp_path / "my plan.json"
    plan.write_text(json.dumps({"a.*.up": "colwise", "a.*.down": "rowwise"}))
    made = convert_plan(plan)
    assert styles(made.text) == {"a.*.up": "colwise", "a.*.down": "rowwise"} and "name: my-plan\n" in str(made.text)
    yaml = tmp_path / "plan.yaml"
    yaml.write_text("a.*.up: colwise\na.*.down: rowwise\na.*.down: colwise\n")
    twice = convert_plan(str(yaml))
    assert twice.text is None and [d.code for d in twice.report.diagnostics] == ["SP103"]
    assert "SP101" in str(convert_plan(tmp_path / "no.json").report)
    code = tmp_path / "plan.py"
    code.write_text("plan = {'a': 'colwise'}")
    assert convert_plan(code).text is None, "no file is ever run"


def test_forms_that_do_not_fit() -> None:
    names = {"a.up": "colwise"}
    for source, form in (
        (names, "torch"),
        (names, "deepspeed"),
        (foreign.DEEPSPEED, "transformers"),
        ({"a": ColwiseParallel()}, "transformers"),
    ):
        assert [code for code, _ in said(source, form=form)] == ["SP540"]
    for form in ("transformers", "automodel"):
        assert said(names, form=form) == []


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="give either"):
        convert_plan()
    with pytest.raises(ValueError, match="give either"):
        convert_plan({"a": "colwise"}, import_path="a:b")
    with pytest.raises(ValueError, match="there is no form 'vllm'"):
        convert_plan({"a": "colwise"}, form="vllm")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a file or a dictionary"):
        convert_plan(3)  # type: ignore[arg-type]
    assert [d.code for d in convert_plan({"a": "colwise"}, model="no_such_type").report.errors] == ["SP504"]
    assert [d.code for d in convert_plan("hf").report.errors] == ["SP544"]


# --- names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["whole", "without a head", "with adapters"])
def test_an_entry_means_the_modules_that_a_rule_reaches(which: str) -> None:
    """Adapters' own modules and parameters belong to the layer; one that is trained whole replaces its original."""
    model = small_model("llama")
    if which == "with adapters":
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
        )
    tree = tree_of(model.model if which == "without a head" else model)
    places, names = Places(tree), Names(tree)
    for glob in ("**", "*", "model", "lm_head", "model.layers.0.mlp", "*.**.{q_proj,weight}", "model.layers.*.mlp.*"):
        reached = names.reach(parse_glob(glob))
        assert set(places.of((glob,))) == {*reached.modules, *reached.parameters}, glob


class ShardingConfig:
    """torchtitan 0.3's, by its name and fields."""

    def __init__(
        self, states: dict[str, Any], enters: Any = None, wanted: Any = None, out: Any = None, leaves: Any = None
    ) -> None:
        self.state_shardings, self.in_src_shardings, self.in_dst_shardings = states, enters, wanted
        self.out_src_shardings, self.out_dst_shardings, self.local_map = out, leaves, None


class SpmdLayout:
    def __init__(self, tp: str) -> None:
        self.tp = tp

    def per_axis_spmd_types(self) -> dict[str, Any]:
        split = SimpleNamespace(dim=int(self.tp[2:-1])) if self.tp.startswith("S(") else SimpleNamespace(name=self.tp)
        return {"dp": SimpleNamespace(name="R"), "tp": split}


def titan(state: str = "", out: str = "", leaves: str = "", **moved: tuple[str, str]) -> ShardingConfig:
    made = {"weight": SpmdLayout(state)} if state else {}
    enters, wanted = ({name: SpmdLayout(pair[i]) for name, pair in moved.items()} or None for i in (0, 1))
    return ShardingConfig(made, enters, wanted, *(SpmdLayout(word) if word else None for word in (out, leaves)))


def test_sharding_configs_of_torchtitan() -> None:
    layer = "model.layers.*"
    source = {
        "model.embed_tokens": titan("S(0)", "P", "S(1)", input=("R", "R")),
        f"{layer}.input_layernorm": titan("R", "S(1)", input=("S(1)", "S(1)")),
        f"{layer}.self_attn": titan(hidden_states=("S(1)", "R")),
        f"{layer}.self_attn.q_proj": titan("S(0)", "S(-1)"),
        f"{layer}.self_attn.k_proj": titan("S(0)", "S(-1)"),
        f"{layer}.self_attn.v_proj": titan("S(0)", "S(-1)"),
        f"{layer}.self_attn.o_proj": titan("S(1)", "P", "S(1)"),
        f"{layer}.post_attention_layernorm": titan("R", "S(1)", input=("S(1)", "S(1)")),
        f"{layer}.mlp": titan(x=("S(1)", "R")),
        f"{layer}.mlp.gate_proj": titan("S(0)", "S(-1)"),
        f"{layer}.mlp.up_proj": titan("S(0)", "S(-1)"),
        f"{layer}.mlp.down_proj": titan("S(1)", "P", "S(1)"),
        "model.norm": titan("R", "S(1)", "R", input=("S(1)", "S(1)")),
        "lm_head": titan("S(0)", "S(-1)", "S(-1)", input=("R", "R")),
    }
    made = convert_plan(source, model=Model("llama", {"num_hidden_layers": 2}), tp=2)
    assert made.ok and made.document is not None, made.report
    whole, sliced = made.document["tensor_parallel"], made.document["sequence_parallel"]
    assert whole["model.embed_tokens"] == "embedding_rowwise" and whole["lm_head"] == "colwise_vocab"
    assert (
        whole["model.layers.*.mlp.down_proj"] == "rowwise" and sliced["model.layers.*.mlp.down_proj"] == "rowwise_seq"
    )
    assert sliced["model.norm"] == {"style": "sequence_parallel", "output": "gather"}
    heads = titan("R", "S(2)", input=("S(2)", "S(2)"))
    assert convert_plan({"layers.*.q_norm": heads}).document["tensor_parallel"] == {
        "layers.*.q_norm": "replicated_with_grad_allreduce"
    }
    for config, words in (
        (titan("R"), "which the config does not say"),
        (titan("S(2)", "P"), "no layer of ours"),
        (titan(x=("S(1)", "R"), y=("S(1)", "R")), "it moves several values"),
        (titan("S(0)", "V"), "is not a layout of a value here"),
    ):
        made = convert_plan({"layers.*.a": config})
        assert not made.ok and [d.code for d in made.report.diagnostics if d.is_error] == ["SP542"]
        assert words in str(made.report)
