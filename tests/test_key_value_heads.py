"""More tp ranks than key-value heads: several ranks compute with one head, and each stores a part of it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from small_models import batch, small_config, small_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training_runs import TWO_BY_TWO, Recipe, compare
from transformers import AutoConfig

import shardplan
from shardplan import Model, applied
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.layout import I, R, V
from shardplan.proof.compare import relative_error
from shardplan.proof.threads import on_threads
from shardplan.runtime.parallel import reading, regather, shared_rows, style
from shardplan.runtime.parallel.shared_rows import SharedRows
from shardplan.runtime.parallel.tensor_moves import move
from shardplan.styles import bound, divided_numbers
from tests.collective_counter import CollectiveCounter

TWO, ONE = {"num_key_value_heads": 2}, {"num_key_value_heads": 1}
HEADS = {"num_attention_heads": 8}
ATTENTION = "model.layers.0.self_attn"

QUICK = [("llama", TWO, 4), ("phi3", ONE, 2)]
SLOW = [
    ("qwen2", TWO, 4),  # biases
    ("qwen3", ONE, 2),  # norms of the heads
    ("phi3", TWO, 4),  # packed
    ("minimax_m2", TWO, 4),  # norms over the features of all heads
    ("gpt_bigcode", {"multi_query": True}, 4),
    ("falcon", {"num_attention_heads": 16, "hidden_size": 1024}, 4),
]
ALL = [
    ("llama", ONE, 4),
    ("qwen3", TWO, 4),
    ("gemma3_text", ONE, 4),
    ("qwen3_moe", TWO, 4),
    ("olmo2", ONE, 2),
    ("gemma3n_text", TWO, 4),  # layers that read the keys of others
    ("gpt_oss", TWO, 4),  # keys and values repeated in the model's code
    ("mistral", ONE, 8),
]


def named(row: tuple[str, dict[str, int], int]) -> str:
    return f"{row[0]}-{row[1].get('num_key_value_heads', 1)}-tp{row[2]}"


@pytest.mark.parametrize(
    "row",
    [
        *QUICK,
        *(pytest.param(row, marks=pytest.mark.slow, id=named(row)) for row in SLOW),
        *(pytest.param(row, marks=pytest.mark.exhaustive, id=named(row)) for row in ALL),
    ],
    ids=named,
)
def test_it_is_proven_in_all_variants(row: tuple[str, dict[str, int], int]) -> None:
    name, settings, tp = row
    own = settings if "num_key_value_heads" not in settings else HEADS | settings
    report = shardplan.validate(Model(name, settings=own), "auto", {"tp": tp})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.parametrize("sizes", [{"tp": 4}, TWO_BY_TWO], ids=["tp", "fsdp2"])
@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.slow)],
    ids=["tp", "sp"],
)
def test_it_trains_as_the_unsharded_model(sizes: dict[str, int], sequence_parallel: bool) -> None:
    """Losses, norms, clipping, AdamW and every parameter, in real processes."""
    settings = TWO if sizes["tp"] == 4 else ONE
    compare(Recipe("qwen3", sizes, sequence_parallel, settings=settings))


@pytest.mark.parametrize(
    "name", [pytest.param("qwen2", marks=pytest.mark.exhaustive), pytest.param("phi3", marks=pytest.mark.slow)]
)
def test_biases_and_packed_matrices_train_as_unsharded(name: str) -> None:
    compare(Recipe(name, {"tp": 4}, True, settings=TWO))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("settings", [TWO, ONE], ids=["two", "one"])
def test_others_train_as_unsharded(name: str, sequence_parallel: bool, settings: dict[str, int]) -> None:
    compare(Recipe(name, {"tp": 4}, sequence_parallel, settings=settings, mixture=name == "qwen3_moe"))
    compare(Recipe(name, TWO_BY_TWO, sequence_parallel, settings=ONE, mixture=name == "qwen3_moe"))


def test_the_program_says_what_is_stored_and_what_is_computed_with() -> None:
    model = Model("llama", settings=HEADS | TWO)
    program = shardplan.compile_plan(model, {"tp": 4}, "llama")
    weight = program.modules[f"{ATTENTION}.k_proj"].parameters[0]
    assert (weight.stored, str(weight.computed)) == (V(0), "V(0)/2")
    assert program.modules[ATTENTION].divide == (("num_key_value_groups", 2),)
    shown = program.describe()
    assert "  weight: Shard(0), gathered from 2 neighbouring ranks, gradient shard" in shown
    assert "  one gather from 2 ranks: self_attn.k_proj.weight, self_attn.v_proj.weight" in shown
    whole = shardplan.compile_plan(Model("llama", settings=HEADS | ONE), {"tp": 2}, "llama")
    assert whole.modules[f"{ATTENTION}.k_proj"].parameters[0].computed == R
    packed = shardplan.compile_plan(Model("phi3", settings=HEADS | TWO), {"tp": 4}, "phi3")
    assert packed.modules[f"{ATTENTION}.qkv_proj"].parameters[0].copies == (1, 2, 2)
    assert dict(packed.modules[ATTENTION].divide) == {
        "config.num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_key_value_groups": 2,
    }


def test_rules_for_single_parameters_share_heads_too() -> None:
    plan = {
        "version": "1",
        "name": "x",
        "extends": "llama",
        "tensor_parallel": {"model.layers.*.self_attn.{q,k,v}_proj": "none"},
    }
    plan["tensor_parallel"]["model.layers.*.self_attn.{q,k,v}_proj.weight"] = "colwise"
    model = Model("llama", settings={"num_attention_heads": 16, **TWO})
    report = shardplan.validate(model, plan, {"tp": 4}, sequence_parallel=False)
    assert report.ok, report.diagnostics
    program = shardplan.compile_plan(model, {"tp": 4}, plan, sequence_parallel=False)
    assert dict(program.modules[ATTENTION].divide) == {"num_key_value_groups": 2}


# What cannot be shared


@pytest.mark.parametrize(
    ("settings", "tp", "why"),
    [
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, 12, "tp=12 is not a multiple of it"),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
            9,
            "3 ranks, and they do not divide its 64",
        ),
    ],
)
def test_sizes_that_share_no_head_are_refused(settings: dict[str, int], tp: int, why: str) -> None:
    settings = {"hidden_size": 576, "intermediate_size": 1152, **settings}
    report = shardplan.validate(Model("llama", settings=settings), "llama", {"tp": tp}, layouts=False)
    (finding,) = (d for d in report.errors if d.code == "SP302")
    assert why in finding.message and "fits everything" in finding.help


def test_every_size_that_is_allowed_is_right() -> None:
    model = Model("llama", settings={"num_attention_heads": 8, "num_key_value_heads": 2})
    report = shardplan.validate(model, "llama", {"tp": 1})
    assert report.allowed_tp[:4] == (1, 2, 4, 8)
    assert shardplan.validate(model, "llama", {"tp": 8}).ok


# Mistakes


def one_share_alone(self: SharedRows, gradients: list[Tensor], dtype: Any) -> list[Tensor]:
    """The sum of nothing: each rank keeps what it computed itself."""
    own = dist.get_rank() % 2
    return [x.chunk(2, dim)[own].contiguous() for x, dim in zip(gradients, self.dims, strict=True)]


def strided(mesh: DeviceMesh, copies: int) -> DeviceMesh:
    """Ranks 0 and 2, 1 and 3 in place of neighbours."""
    apart = mesh.size() // copies
    members = list(range(mesh.get_local_rank() % apart, mesh.size(), apart))
    group = dist.new_group(members, use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type, members, mesh_dim_names=("heads",))


def by_all_ranks(plan: Any, module: Any, shared: Any) -> tuple[tuple[str, int], ...]:
    """The number of groups divided by tp in place of r."""
    right = divided_numbers.divided(plan, module, shared)
    return tuple((name, 4 if name == "num_key_value_groups" else by) for name, by in right)


@pytest.mark.usefixtures("no_repairs")
@pytest.mark.parametrize(
    ("where", "name", "wrong", "code"),
    [
        (SharedRows, "reduce", one_share_alone, "SP420"),
        (style, "neighbours", strided, "SP420"),
        (bound, "divided", by_all_ranks, "SP404"),
    ],
    ids=["not summed", "strided", "groups by tp"],
)
def test_a_mistake_is_caught(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any, code: str) -> None:
    monkeypatch.setattr(where, name, wrong)
    model = AutoConfig.for_model("llama", num_attention_heads=16, **TWO, attn_implementation="eager")
    report = shardplan.validate(model, "llama", {"tp": 4}, sequence_parallel=False)
    assert code in {d.code for d in report.errors}, report.diagnostics


@pytest.mark.usefixtures("no_repairs")
def test_the_layout_check_knows_that_shared_gradients_are_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm of the key's heads whose gradient counts as complete."""
    plan = {"version": "1", "name": "x", "extends": "qwen3", "tensor_parallel": {}}
    plan["tensor_parallel"]["model.layers.*.self_attn.k_norm"] = "replicate"
    for settings, tp in ((TWO, 4), (ONE, 2)):
        model = Model("qwen3", settings=HEADS | settings)
        report = shardplan.validate(model, plan, {"tp": tp}, sequence_parallel=False, proof=False)
        assert [d.code for d in report.errors] == ["SP401"], report.diagnostics


class Keys(nn.Module):
    """Like attention, and its keys may also go to a matrix of their own."""

    def __init__(self, summaries: bool) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = 8, 4
        self.q_proj, self.k_proj = nn.Linear(16, 64, bias=False), nn.Linear(16, 16, bias=False)
        self.o_proj = nn.Linear(64, 16, bias=False)
        self.summary = nn.Linear(16, 16, bias=False) if summaries else None

    def forward(self, x: Tensor) -> Tensor:
        keys = self.k_proj(x)
        q, k = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.q_proj(x), keys))
        mixed = q * k.repeat_interleave(self.num_key_value_groups, 2)
        result = self.o_proj(mixed.flatten(2))
        return result if self.summary is None else result + self.summary(keys)


class TwoLayers(nn.Module):
    def __init__(self, summaries: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keys(summaries), Keys(summaries)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def features(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize(("style", "codes"), [(None, []), ("rowwise", ["SP301"]), ("replicate", ["SP402", "SP408"])])
def test_keys_that_several_ranks_have_are_not_read_as_slices(style: str | None, codes: list[str]) -> None:
    rules = {"": "input_with_grad_allreduce", ".{q,k}_proj": "colwise", ".o_proj": "rowwise"}
    rules |= {} if style is None else {".summary": style}
    plan = {"version": "1", "name": "keys", "tensor_parallel": {f"layers.*{at}": one for at, one in rules.items()}}
    report = shardplan.validate(shardplan.Model(TwoLayers(style is not None), inputs=features), plan, {"tp": 4})
    assert [d.code for d in report.errors] == codes, report.diagnostics


# When it runs


def test_a_move_to_shared_rows() -> None:
    """V(0) -> V(0)/2: the value, and the gradient as a sum over the two ranks."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(8, 3, generator=generator)
    gradients = torch.randn(4, 4, 3, generator=generator)

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        pair = shared_rows.neighbours(mesh, 2)
        x = whole.chunk(4)[rank].clone().requires_grad_()
        y = move(x, pair, V(0), over(2))
        assert torch.equal(y, whole.chunk(2)[rank // 2])
        y.backward(gradients[rank])
        total = gradients[rank // 2 * 2] + gradients[rank // 2 * 2 + 1]
        torch.testing.assert_close(x.grad, total.chunk(2)[rank % 2])

    on_threads(4, run)


def over(copies: int) -> Any:
    return replace(V(0), copies=copies)


@pytest.mark.slow
def test_collectives_and_memory() -> None:
    """One gather for a block, one more in backward, one reduce-scatter; nothing gathered is kept between them."""
    for counted, expected, alive in on_ranks(4, count):
        assert counted == expected
        assert expected["forward"]["all_gather"] == 2 + 1  # a block each, and the logits
        assert expected["backward"]["all_gather"] == expected["backward"]["reduce_scatter"] == 2
        assert alive == 0


def count() -> tuple[Any, Any, int]:
    model = small_model("llama", **TWO)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(model, mesh, "llama", prove=False, check_inputs=False)
    stored = model.get_submodule(f"{ATTENTION}.k_proj").weight
    assert isinstance(stored, DTensor) and stored.placements == (Shard(0),) and stored.to_local().shape == (4, 64)
    gathered: list[weakref.ref[Tensor]] = []
    gather = regather.note

    def watched(wholes: Any, again: Any) -> None:
        gathered.extend(weakref.ref(x) for x in wholes)
        gather(wholes, again)

    reading.note = watched
    try:
        ids = batch(0)
        with CollectiveCounter() as forward:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        gc.collect()
        alive = sum(one() is not None for one in gathered)
        assert len(gathered) == 4
        with CollectiveCounter() as backward:
            loss.backward()
    finally:
        reading.note = gather
    assert stored.grad.placements == (Shard(0),)
    expected = expected_collectives(applied(model).program.modules)
    counts = {"forward": dict(forward.counts), "backward": dict(backward.counts)}
    return counts, {k: dict(v) for k, v in expected.items()}, alive


@pytest.mark.slow
def test_generate() -> None:
    model = small_model("qwen3", **TWO).eval()
    prompt = batch(1, length=6)
    expected = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    for tokens, cached in on_ranks(4, generated):
        assert torch.equal(tokens, expected)
        assert cached == 1  # head in each rank's cache


def generated() -> tuple[Tensor, int]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(small_model("qwen3", **TWO).eval(), mesh, "auto", prove=False)
    prompt = batch(1, length=6)
    tokens = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    with torch.no_grad():
        cache = model(input_ids=prompt, use_cache=True).past_key_values
    return tokens, cache.layers[0].keys.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_kernels_and_sliding_windows(attention: str) -> None:
    model = AutoConfig.for_model("gemma3_text", **HEADS, **TWO, sliding_window=8, attn_implementation=attention)
    report = shardplan.validate(model, "auto", {"tp": 4})
    assert report.ok, report.diagnostics


def test_adapters_follow() -> None:
    """LoRA's B is split and shared as its layer's weight is."""
    model = get_peft_model(small_model("qwen3", **TWO), LoraConfig(target_modules=["k_proj", "v_proj", "q_proj"]))
    program = shardplan.compile_plan(model, {"tp": 4}, "qwen3")
    (k_proj,) = (m for m in program.modules.values() if m.name.endswith("layers.0.self_attn.k_proj"))
    assert {p.name: (p.stored, str(p.computed)) for p in k_proj.parameters} == {
        "base_layer.weight": (V(0), "V(0)/2"),
        "lora_A.default.weight": (I, "R"),
        "lora_B.default.weight": (V(0), "V(0)/2"),
    }
    report = shardplan.validate(model, "qwen3", {"tp": 4})
    assert report.ok, report.diagnostics


@pytest.mark.slow
def test_an_estimate_counts_the_gathers() -> None:
    step = shardplan.TrainingStep(32, optimizer="sgd", precision="fp32")
    few, many = (
        shardplan.estimate(Model("llama", settings=vars_of(heads)), "llama", {"tp": 4}, step, logits="replicated")
        for heads in (2, 4)
    )
    calls = [{(one.axis, one.collective): one.calls for one in found.traffic} for found in (few, many)]
    assert (
        calls[0]["tp", "all_gather"] - calls[1].get(("tp", "all_gather"), 0) == 2 * 2
    )  # forward, and again in backward
    assert calls[0]["tp", "reduce_scatter"] - calls[1].get(("tp", "reduce_scatter"), 0) == 2


def vars_of(heads: int) -> dict[str, Any]:
    config = small_config("llama", num_key_value_heads=heads)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    return {"num_key_value_heads": heads, **{name: getattr(config, name) for name in names}}


@pytest.mark.slow
def test_half_precision_with_fsdp2() -> None:
    """The shared rows' gradients are summed in the dtype of `reduce`: the error is that of bfloat16, not of a lost share."""
    model = small_model("qwen3", dtype=torch.float64, **ONE)
    ids = batch(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name}
    for found in on_ranks(4, mixed):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert relative_error(gradient, expected[name]) <= 0.05, name


def mixed() -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = small_model("qwen3", **ONE)
    precision = {"param": "bfloat16", "reduce": "float32"}
    model = shardplan.apply_plan(model, mesh, "auto", data_parallel={"mixed_precision": precision}, prove=False)
    ids = batch(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {
        name: p.grad.full_tensor().double()
        for name, p in model.named_parameters()
        if "k_proj" in name or "v_proj" in name
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"compile": {"modules": ["model.layers.*"], "backend": "aot_eager"}}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"activation_checkpointing": {"mode": "full"}}, marks=pytest.mark.exhaustive),
        pytest.param({"activation_checkpointing": {"modules": ["model.layers.*.self_attn"]}}, marks=pytest.mark.slow),
    ],
    ids=["compiled", "checkpoints", "checkpoints inside blocks"],
)
@pytest.mark.proves("tp sp compile", "tp sp checkpointing")
def test_compiled_and_checkpointed_blocks_train_alike(options: dict[str, Any]) -> None:
    compare(Recipe("phi3", {"tp": 4}, True, options=options, settings=TWO))
