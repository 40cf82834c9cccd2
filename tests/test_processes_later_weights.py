"""Weights' gradients while their input's gradient is reduced: the order, and that every gradient is what it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from small_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardplan
from benchmarks.ways import fake_ranks, fresh, llama, planned
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply.applied import applied
from shardplan.torchlib.private import private
from tests.own_models import WIDTH, Stack, tokens

AT_LAYERS = {
    "version": "1",
    "tensor_parallel": {"layers.*.part.{q,k}": "colwise", "layers.*.part.o": "rowwise"},
}
AT_BLOCK = {
    "version": "1",
    "tensor_parallel": {**AT_LAYERS["tensor_parallel"], "layers.*.part": "input_with_grad_allreduce"},
}
AT_SEQUENCE = {
    **AT_BLOCK,
    "sequence_parallel": {
        "layers.0": "split_seq_input",
        "layers.*.norm": "sequence_parallel",
        "layers.*.part": "gather_seq_input",
        "layers.*.part.{q,k}": "colwise",
        "layers.*.part.o": "rowwise_seq",
        "head": "colwise_seq_gather_output",
    },
}
Case = Callable[["Part", Tensor], tuple[Tensor, Tensor]]


class Part(nn.Module):
    """Two Linear layers that read one value, as a case calls them."""

    case: Case

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = type(self).case(self, x)
        return self.o(q * k.sigmoid())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(WIDTH), Part()
        self.part_again = False  # a checkpoint runs the part a second time, without the layer

    def forward(self, x: Tensor) -> Tensor:
        part = partial(checkpoint, self.part, use_reentrant=False) if self.part_again else self.part
        return x + part(self.norm(x))


def plain(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q(x), part.k(x)


def twice(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q(x) + part.q(x) * part.q(x + 1), part.k(x)


def flat(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q(x.flatten(0, 1)).view(*x.shape[:-1], -1), part.k(x)


def other_reader(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q(x) * x[..., :1], part.k(x)


def unused(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    part.k(x)
    q = part.q(x)
    return q, q


def changed_before(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return part.q(x), part.k(x)


def changed_after(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q(x).mul_(3), part.k(x)


def hooked_after(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k = part.q(x), part.k(x)
    double(part.q, x, q)
    k.register_hook(lambda gradient: gradient * 3)
    return q, k


def without_gradient(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        k = part.k(x)
    return part.q(x), k


def by_name(part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
    return part.q(input=x), part.k(x)


def checkpointed(part: Part, x: Tensor, reentrant: bool) -> tuple[Tensor, Tensor]:
    return checkpoint(part.q, x, use_reentrant=reentrant), part.k(x)


def double(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 2)


def hooked(model: nn.Module) -> None:
    for layer in model.layers:
        layer.part.q.register_forward_hook(double)
        layer.part.k.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))


def frozen(model: nn.Module) -> None:
    model.layers[0].part.q.weight.requires_grad_(False)
    model.layers[1].part.k.requires_grad_(False)


def part_again(model: nn.Module) -> None:
    for layer in model.layers:
        layer.part_again = True


def frozen_below(model: nn.Module) -> None:
    model.embed.requires_grad_(False)
    model.layers[0].norm.requires_grad_(False)


def tied(model: nn.Module) -> None:
    model.layers[1].part.q.weight = model.layers[0].part.q.weight


CASES: dict[str, tuple[Case, Callable[[nn.Module], object]]] = {
    **{
        case.__name__: (case, nullcontext)
        for case in (
            plain,
            twice,
            flat,
            other_reader,
            unused,
            changed_before,
            changed_after,
            hooked_after,
            without_gradient,
            by_name,
        )
    },
    "checkpoint": (partial(checkpointed, reentrant=False), nullcontext),
    "re-entrant checkpoint": (partial(checkpointed, reentrant=True), nullcontext),
    **{make.__name__: (plain, make) for make in (hooked, frozen, frozen_below, tied, part_again)},
}


# What a plan refuses: the other reader's gradient would be a partial sum (SP401), and torch changes no value in place that a function of
# ours has returned as it was.
REFUSED = ((other_reader, AT_LAYERS), (changed_before, AT_BLOCK))


def made(change: Callable[[nn.Module], object]) -> nn.Module:
    torch.manual_seed(3)
    model = Stack(Layer)
    change(model)
    return model


def gradients(model: nn.Module, fired: list[str], autocast: bool = False) -> dict[str, Tensor | None]:
    """Of two steps added up; and the parameters whose hooks fired."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for seed in (1, 2):
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(**tokens(seed))["loss"]
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def differences(
    name: str, split: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], most: float
) -> list[str]:
    found = []
    for parameter, gradient in expected.items():
        if (split[parameter] is None) != (gradient is None):
            found.append(f"{name}: {parameter} has a gradient, or has none")
        elif gradient is not None and (error := relative_error(whole(split[parameter]), gradient)) > most:
            found.append(f"{name}: {parameter} is {error:.1e} off")
    return found


def misfits() -> list[str]:
    """On every rank, what differs from the unsharded model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []
    for (name, (case, change)), plan in product(CASES.items(), (AT_LAYERS, AT_BLOCK, AT_SEQUENCE)):
        if (case, plan) in REFUSED or (plan is AT_SEQUENCE and case not in (plain, twice, changed_before)):
            continue
        Part.case = staticmethod(case)
        for autocast in (False, True) if name in ("plain", "twice", "frozen") else (False,):
            own: list[str] = []
            fired: list[str] = []
            expected = gradients(made(change), own, autocast)
            split = gradients(
                shardplan.apply_plan(
                    made(change), mesh, plan, prove=False, sequence_parallel="sequence_parallel" in plan
                ),
                fired,
                autocast,
            )
            if (ran := {one for one in fired if split[one] is not None}) != set(own):
                found.append(f"{name}: hooks of {ran ^ set(own)} fired in one of the two")
            found += differences(name, split, expected, 2e-2 if autocast else TOLERANCE[torch.float32])
    return found


def test_every_gradient_is_that_of_the_unsharded_model() -> None:
    assert on_ranks(2, misfits) == [[], []]


def asked_alone() -> list[str]:
    """The gradients of some parameters, asked for one backward after another on one graph."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    Part.case = staticmethod(plain)
    found = []
    for plan in (AT_LAYERS, AT_BLOCK):
        plain_model, split = made(nullcontext), shardplan.apply_plan(made(nullcontext), mesh, plan, prove=False)
        asked: list[dict[str, Tensor | None]] = []
        for model in (plain_model, split):
            loss, part = model(**tokens(1))["loss"], model.layers[1].part
            chosen = {"bias": part.q.bias, "weight": part.q.weight, "below": model.layers[0].part.k.weight}
            asked.append({name: torch.autograd.grad(loss, [one], retain_graph=True)[0] for name, one in chosen.items()})
            loss.backward()  # nothing of the earlier ones is in it
            asked[-1].update((name, p.grad) for name, p in model.named_parameters())
        found += differences("alone", asked[1], asked[0], TOLERANCE[torch.float32])
    try:
        torch.autograd.grad(split(**tokens(1))["loss"], [split.layers[0].part.q.weight], create_graph=True)
        found.append("differentiated twice")
    except RuntimeError as error:
        if "cannot be differentiated again" not in str(error):
            raise
    return found


def test_gradients_that_are_asked_for_one_by_one() -> None:
    assert on_ranks(2, asked_alone) == [[], []]


def lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


WAYS: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "sp, regather": {"sequence_parallel": True, "regather": True},
    "tp, checkpointed": {"sequence_parallel": False, "activation_checkpointing": {}},
    "sp, checkpointed, fsdp2": {"sequence_parallel": True, "activation_checkpointing": {}, "data_parallel": {}},
    "tp, fsdp2": {"sequence_parallel": False, "data_parallel": {}},
}


def of_llama() -> list[str]:
    """A Llama on dp 1 x tp 2 with the built-in plan in all ways, whole and with LoRA."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    config = llama(2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4)
    ids = torch.randint(99, (2, 8), generator=torch.Generator().manual_seed(3))

    def stepped(model: nn.Module) -> dict[str, Tensor | None]:
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    found = []
    for adapted in (False, True):
        change = lora if adapted else (lambda model: model)
        torch.manual_seed(5)
        expected = stepped(change(fresh(config)))
        for name, options in WAYS.items():
            if adapted and name not in ("sp", "tp, fsdp2"):
                continue
            torch.manual_seed(5)
            options = {"data_parallel": False, **options}
            split = shardplan.apply_plan(change(fresh(config)), mesh, "llama", prove=False, **options)
            found += differences(f"{name}, adapted {adapted}", stepped(split), expected, TOLERANCE[torch.float32])
    return found


def test_a_llama_in_all_ways() -> None:
    assert on_ranks(2, of_llama) == [[], []]


class Order(private("TorchDispatchMode")):
    """The products and collectives of a backward, in order, with the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("mm", "addmm", "all_reduce_", "reduce_scatter_tensor", "wait_tensor"):
            self.seen.append((name, tuple(result.shape)))
        return result


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_a_reduction_is_under_way_while_weights_get_their_gradients(sp: bool) -> None:
    """Of q, k and v, and of gate and up: all inputs' gradients, the reduction begins, all weights' gradients, and it is waited for."""
    config = llama(1, hidden_size=64, intermediate_size=144, num_attention_heads=8)
    with fake_ranks(2) as mesh:
        model = planned(config, mesh, sp=sp)
        loss = model(input_ids=torch.randint(99, (1, 10))).logits.sum()
        with Order() as order:
            loss.backward()
    begins = "reduce_scatter_tensor" if sp else "all_reduce_"
    names = [name for name, _ in order.seen]
    found = [i for i, name in enumerate(names) if name == begins and names[i + 1] != "wait_tensor"]
    assert len(found) == 2, order.seen
    for begun, rows in zip(found, ([72, 72], [32, 32, 32]), strict=True):
        after = begun + 1 + len(rows)
        assert order.seen[begun - len(rows) : begun] == [("mm", (10, 64))] * len(rows)
        assert order.seen[begun + 1 : after] == [("mm", (out, 64)) for out in rows]
        assert names[after] == "wait_tensor"


def test_what_a_module_is_decides() -> None:
    """A subclass, a forward of one's own, a hook, an adapter: the layer stays as it is."""

    class Linear(nn.Linear):
        pass

    def subclass(part: nn.Module) -> None:
        part.k = Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward_of_its_own(part: nn.Module) -> None:
        part.k.forward = nn.Linear.forward.__get__(part.k)

    def hook(part: nn.Module) -> None:
        part.k.register_full_backward_hook(lambda *_: None)

    def nothing(part: nn.Module) -> None:
        pass

    Part.case = staticmethod(plain)
    for change in (subclass, forward_of_its_own, hook, nothing):
        for plan in (AT_LAYERS, AT_BLOCK):
            model = made(lambda model, change=change: [change(layer.part) for layer in model.layers])
            with fake_ranks(2) as mesh:
                model = shardplan.apply_plan(model, mesh, plan, data_parallel=False, prove=False)
            names = {"q", "k"} if change is nothing else {"q"}
            assert set(applied(model).overlapped) == {f"layers.{i}.part.{name}" for i in range(2) for name in names}
    with fake_ranks(2) as mesh:
        config = llama(1, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4)
        adapted = shardplan.apply_plan(lora(fresh(config)), mesh, "llama", data_parallel=False, prove=False)
    assert {name.rpartition(".")[2] for name in applied(adapted).overlapped} == {"k_proj", "v_proj", "gate_proj"}
