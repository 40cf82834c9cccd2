"""What FSDP2 is made to do: frozen modules, ignored parameters, units by dtype, gathering ahead, put-off reductions."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import TWO_BY_TWO, Recipe, compare

import shardplan
from shardplan.proof.compare import relative_error
from shardplan.runtime.parallel.fsdp_units import groups_of

LAYERS = 4


def freeze(model: nn.Module) -> None:
    """The embedding, the first layer, and a part of the second."""
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)


def planned(name: str, mesh: Any, *, freezing: bool = False, layers: int = LAYERS, **data_parallel: Any) -> nn.Module:
    model = small_model(name, num_hidden_layers=layers)
    if freezing:
        freeze(model)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, data_parallel=data_parallel, prove=False)
    return model


def step(model: nn.Module, *parts: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss over the parts, and the gradients."""
    total = 0.0
    for ids in parts:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(parts)
        loss.backward()
        total += loss.item()
    return total, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def expected(frozen: bool, name: str = "qwen3", layers: int = LAYERS) -> tuple[float, dict[str, torch.Tensor]]:
    model = small_model(name, num_hidden_layers=layers)
    if frozen:
        freeze(model)
    return step(model, batch(0), batch(1))


def equal(run: tuple[float, dict[str, torch.Tensor]], reference: tuple[float, dict[str, torch.Tensor]]) -> None:
    """The gradients; the loss is that of one share."""
    assert run[1].keys() == reference[1].keys()
    for name, value in reference[1].items():
        assert relative_error(run[1][name], value) <= 1e-5, name


# Frozen modules and ignored parameters


def held_by_data_parallelism(model: nn.Module) -> set[str]:
    """The names of the parameters that are sharded over dp_shard."""
    return {name for name, p in model.named_parameters() if "dp_shard" in p.device_mesh.mesh_dim_names}


def units_of(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def frozen_somewhere(wheres: list[dict[str, Any]]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    layers = {f"model.layers.{i}" for i in range(LAYERS)}
    reference = expected(True)
    units = {
        "": {"", *layers},
        "own": {"", "model.embed_tokens", *layers},
        "root": {"", *layers - {"model.layers.0"}},
        "replicated": {"", *layers},
    }
    for where in wheres:
        model = planned("qwen3", mesh, freezing=True, **where)
        everything = {name for name, _ in model.named_parameters()}
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert units_of(model) == units[where.get("frozen", "")]
        ignored = frozen if where.get("frozen") == "replicated" else set()
        if "ignored" in where:
            ignored = {name for name in everything if name.startswith("model.layers.0.")}
        assert held_by_data_parallelism(model) == everything - ignored
        before = {name: whole(p).clone() for name, p in model.named_parameters()}
        run = step(model, batch(mesh.get_local_rank("dp_shard")))
        equal(run, reference)
        assert {name for name, p in model.named_parameters() if p.grad is not None} == everything - frozen
        for name, p in model.named_parameters():
            assert torch.equal(whole(p), before[name]), name


@pytest.mark.slow
def test_frozen_modules_are_where_the_plan_says_and_gradients_are_right():
    wheres = [{"frozen": "own"}, {"frozen": "root"}, {"frozen": "replicated"}, {"ignored": ["model.layers.0"]}, {}]
    on_ranks(4, frozen_somewhere, wheres)


# Units by dtype


def of_two_dtypes() -> None:
    """An MLP in float64 in a model in float32: it is a unit of its own, and all gradients keep their dtype."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))

    def build() -> nn.Module:
        model = small_model("llama")
        model.model.layers[1].mlp.double()
        model.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: tuple(x.double() for x in args))
        model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: out.float())
        return model

    model = build()
    # A reduced model has one dtype, and these hooks ask for another.
    shardplan.apply_plan(model, mesh, "auto", allow_unproven=True)
    assert units_of(model) == {"", "model.layers.0", "model.layers.1", "model.layers.1.mlp"}
    run = step(model, batch(mesh.get_local_rank("dp_shard")))
    reference = step(build(), batch(0), batch(1))
    equal(run, reference)
    assert {run[1][name].dtype for name in run[1]} == {torch.float32, torch.float64}
    assert all(run[1][name].dtype == value.dtype for name, value in reference[1].items())


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    **{f"{part}_head_dim": 8 for part in ("qk_rope", "qk_nope", "v")},
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


def in_another_dtype(name: str, settings: dict[str, Any], wide: str, sizes: dict[str, int]) -> None:
    """transformers 5.24 makes routers, biases of scores and sinks in float32, whatever dtype the model has: they keep theirs, and so do their
    gradients."""
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))

    def build() -> nn.Module:
        model = small_model(name, **settings)
        owner, _, own = wide.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, own, nn.Parameter(module.get_parameter(own).detach().double()))
        return model

    model = build()
    shardplan.apply_plan(model, mesh, "auto")
    step(model, batch(mesh.get_local_rank("dp_shard") if "dp_shard" in sizes else 0))
    gradients = {
        name: value for name, _, value in shardplan.full_parameters(model, gradients=True) if value is not None
    }
    equal((0.0, gradients), step(build(), *map(batch, range(sizes.get("dp_shard", 1)))))
    assert {name for name, value in gradients.items() if value.dtype == torch.float64} == {wide}


def test_a_unit_of_two_dtypes_becomes_two():
    on_ranks(4, of_two_dtypes)


@pytest.mark.parametrize(
    ("name", "settings", "wide", "sizes"),
    [
        ("llama", DEEPSEEK, "model.layers.1.mlp.gate.weight", {"dp_shard": 2, "tp": 2}),
        ("gpt_oss", {"attn_implementation": "eager"}, "model.layers.1.self_attn.sinks", {"tp": 2}),
    ],
    ids=["routers", "sinks"],
)
def test_parts_may_have_another_dtype(name: str, settings: dict[str, Any], wide: str, sizes: dict[str, int]):
    """Sinks are in a unit with the attention's matrices, so with FSDP2 they are refused (SP332)."""
    on_ranks(prod(sizes.values()), in_another_dtype, name, settings, wide, sizes)


# After forward


def resharded_over(ranks: int) -> dict[str, tuple[list[list[int]], float]]:
    """Of each layer's parameters between forward and backward: the ranks among which they are split, and this rank's part of them. Checks
    the gradients."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "tp"))
    model = planned("llama", mesh, reshard_after_forward=ranks)
    ids = batch(mesh.get_local_rank("dp_shard"))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    layers = {name: p for name, p in model.named_parameters() if ".layers." in name}
    seen = {
        name: (p.device_mesh.mesh.tolist(), p.to_local().numel() / p.numel())
        for name, p in layers.items()
        if p.ndim > 1
    }
    loss.backward()
    run = 0.0, {name: whole(p.grad) for name, p in model.named_parameters()}
    equal(run, step(small_model("llama", num_hidden_layers=LAYERS), *map(batch, range(4))))
    return seen


def test_a_number_of_ranks_is_where_parameters_stay_after_forward():
    found = on_ranks(4, resharded_over, 2)
    assert all(len(one) == 7 * LAYERS for one in found)
    assert {(str(mesh), part) for one in found for mesh, part in one.values()} == {("[[0, 1], [2, 3]]", 0.5)}


# Gathering ahead


def gathered_at(depths: list[tuple[int | None, int | None]]) -> list[tuple[list[int], list[int]]]:
    """For each pair of depths: how many later layers are gathered or on the way when a layer's forward begins, and how
    many earlier ones when its backward does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    results = []
    for forward, backward in depths:
        ahead = {key: n for key, n in (("forward", forward), ("backward", backward)) if n is not None}
        seen: dict[str, dict[int, int]] = {"forward": {}, "backward": {}}
        first: dict[nn.Module, int] = {}
        last: dict[nn.Module, int] = {}

        def there(which: range) -> int:
            return sum(groups[i].is_unsharded or groups[i]._all_gather_result is not None for i in which)

        def forward_begins(module: nn.Module, args: Any) -> None:
            if module in first:
                seen["forward"].setdefault(first[module], there(range(first[module] + 1, LAYERS)))

        def backward_begins(module: nn.Module, into: Any, out: Any) -> None:
            if module in last:
                seen["backward"].setdefault(last[module], there(range(last[module])))

        # Of all modules, and before the plan: a planned model refuses later hooks where a rank has a share of the values.
        every = nn.modules.module
        hooks = (
            every.register_module_forward_pre_hook(forward_begins),
            every.register_module_full_backward_hook(backward_begins),
        )
        model = planned("llama", mesh, reshard_after_forward=True, prefetch=ahead)
        layers = list(model.model.layers)
        groups = [groups_of(layer._get_fsdp_state())[0] for layer in layers]
        # In a layer, its first norm is the first to compute forward, and its last matrix backward.
        first.update((layer.input_layernorm, i) for i, layer in enumerate(layers))
        last.update((layer.mlp.down_proj, i) for i, layer in enumerate(layers))
        ids = batch(mesh.get_local_rank("dp_shard"))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for hook in hooks:
            hook.remove()
        results.append(tuple([seen[way][i] for i in range(LAYERS)] for way in ("forward", "backward")))
    return results


@pytest.mark.slow
def test_as_many_units_are_gathered_ahead_as_the_plan_says():
    zero, one, two, unsaid = on_ranks(4, gathered_at, [(0, 0), (1, 1), (2, 2), (None, None)])[0]
    assert zero == ([0, 0, 0, 0], [0, 0, 0, 0])
    assert one == ([1, 1, 1, 0], [0, 1, 1, 1])
    assert two == ([2, 2, 1, 0], [0, 1, 2, 2])
    assert unsaid == ([0, 0, 0, 0], [0, 1, 1, 1]), "torch's own choice"


# Reductions that wait for the last micro-batch


class Reductions(TorchDispatchMode):
    """Counts what FSDP2 and DDP reduce, and the small gradients' all-reduces over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_reduce_scatter_base_", "c10d::allreduce_"):
            self.counts["data parallel"] += 1
        elif name == "_c10d_functional::all_reduce_" and args[0].ndim == 1:
            self.counts["tp"] += 1
        return func(*args, **(kwargs or {}))


def accumulated(n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    share = mesh.get_local_rank("dp_shard")
    reference = step(small_model("qwen3"), *(batch(i, s) for i in range(n) for s in range(2)))
    model = planned("qwen3", mesh, layers=2)
    counts = []
    for ids, scale in shardplan.micro_batches(model, [batch(i, share) for i in range(n)], labels=lambda ids: ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss * scale
        with Reductions() as seen:
            loss.backward()
        counts.append(seen.counts)
    assert [bool(c["data parallel"]) for c in counts] == [False] * (n - 1) + [True]
    assert len({c["tp"] for c in counts}) == 1 and counts[0]["tp"], "each backward sums its small gradients over tp"
    equal((0.0, {name: whole(p.grad) for name, p in model.named_parameters()}), reference)

    model.zero_grad()
    with pytest.raises(KeyError):
        for _ in shardplan.micro_batches(model, range(3), labels=lambda _: 1):
            raise KeyError
    run = step(model, batch(share))
    equal(run, step(small_model("qwen3"), batch(0), batch(1)))
    with pytest.raises(ValueError, match="no plan was applied"):
        shardplan.micro_batches(small_model("qwen3"), [1])
    assert list(shardplan.micro_batches(model, [])) == []


def replicas_accumulated(n: int) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    rank = mesh.get_local_rank()
    model = small_model("llama")
    wrapper = shardplan.apply_plan(model, mesh, "auto", data_parallel={"backend": "ddp"}, prove=False)
    for ids, scale in shardplan.micro_batches(wrapper, [batch(i, rank) for i in range(n)], labels=lambda ids: ids):
        (wrapper(input_ids=ids, labels=ids, use_cache=False).loss * scale).backward()
    reference = step(small_model("llama"), *(batch(i, s) for i in range(n) for s in range(4)))
    equal((0.0, {name: p.grad for name, p in model.named_parameters()}), reference)


def test_gradients_are_reduced_at_the_last_micro_batch():
    on_ranks(4, accumulated, 3)
    on_ranks(4, replicas_accumulated, 2)


@pytest.mark.slow
def test_frozen_modules_train_alike():
    options = {"data_parallel": {"frozen": "own"}}
    change = freeze
    compare(Recipe("qwen3", TWO_BY_TWO, options=options, change=change))


# Changes in place of what units return


def changed_in_place(name: str, *ways: tuple[tuple[int, int], bool]) -> list[dict[tuple[int, bool], str]]:
    """Each of the hidden states that a model returns is doubled in place: what comes of it, by its index and whether it is a view.

    Args:
        ways: the sizes of dp_shard and tp, and whether the sequence is split.
    """
    found: list[dict[tuple[int, bool], str]] = []
    for sizes, sequence in ways:
        model, unsharded = small_model(name), small_model(name)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
        shardplan.apply_plan(model, mesh, "auto", sequence_parallel=sequence, prove=False)
        found.append({})
        for i in range(unsharded.config.num_hidden_layers + 1):
            gradients, view, said = [], False, "right"
            for one in (unsharded, model):
                one.zero_grad()
                hidden = one(input_ids=batch(0), use_cache=False, output_hidden_states=True).hidden_states[i]
                view = hidden._is_view()
                try:
                    hidden.mul_(2)
                except RuntimeError as error:
                    assert "is a view and is being modified inplace" in str(error)
                    said = "refused"
                    break
                weights = (
                    torch.linspace(-9, 9, hidden.numel()).sin().view_as(hidden)
                )  # of a norm's output a plain sum is constant
                (hidden * weights).sum().backward()
                gradients.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
            if said == "right":
                assert gradients[0].keys() == gradients[1].keys()
                for at, gradient in gradients[0].items():
                    assert relative_error(whole(gradients[1][at]), gradient) <= 1e-5, (name, sizes, i, at)
            found[-1][i, view] = said
    return found


def test_a_change_in_place_of_what_a_unit_returns_is_right_or_refused():
    """FSDP2 warns of views that its units return: such a change drops its hook."""
    first = {(0, True): "refused", (1, False): "right", (2, False): "right"}
    last = {(0, False): "right", (1, False): "right", (2, True): "refused"}
    for found in on_ranks(2, changed_in_place, "llama", ((1, 2), False), ((1, 2), True), ((2, 1), False)):
        assert found == [first, last, first]
    for [found] in on_ranks(2, changed_in_place, "gpt2", ((2, 1), False)):
        assert found[2, True] == "right", "GPT-2's own code returns a view"
