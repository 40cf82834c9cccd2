"""A sum over ranks takes the memory of a value that nobody else can read, and of no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardplan
from benchmarks.copies import rows
from shardplan.core.layout import I, P, R
from shardplan.runtime.parallel.tensor_moves import move
from tests.own_models import WIDTH, Stack, tokens

RANKS = 2
PLAN = {
    "version": "1",
    "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
}


def test_the_allocator_gives_the_least() -> None:
    """But for the copies that give a gathered batch of several sequences its order, and the input of a reduce-scatter its own."""
    found = {name: (allocated, least) for name, allocated, least in rows()}
    assert found.pop("SP, batch 2") == ("13.00 A", "5.00 A")
    assert {name: allocated for name, (allocated, _) in found.items()} == {
        name: least for name, (_, least) in found.items()
    }
    assert len(found) == 5


# Each returns what backward begins at, and tensors with the values that they must have after it, where 3 is the gradient of what it
# begins at, and the sum over the ranks 3 * RANKS.
Case = Callable[[Tensor, Tensor, DeviceMesh], tuple[Tensor, Callable[[], list[tuple[Tensor | None, float]]]]]


def added(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    return move(a, mesh, I, R) + move(b, mesh, I, R), lambda: [(a.grad, 6), (b.grad, 6)]


def added_views(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    flat = move(a, mesh, I, R).flatten() + move(b, mesh, I, R).t().flatten()
    return flat.view(2, 2), lambda: [(a.grad, 6), (b.grad, 6)]


def product(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    return move(a, mesh, I, R) * 2, lambda: [(a.grad, 12)]


def hooked(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    moved, kept = move(a, mesh, I, R), []
    moved.register_hook(kept.append)
    return moved * 2, lambda: [(a.grad, 12), (kept[0], 6)]


def hooked_view(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    """The gradient is a view of one that is kept."""
    moved, kept = move(a, mesh, I, R), []
    flat = moved.view(4)
    flat.register_hook(kept.append)
    return (flat * 2).view(2, 2), lambda: [(a.grad, 12), (kept[0], 6)]


def retained(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    moved = move(a, mesh, I, R)
    moved.retain_grad()
    return moved * 2, lambda: [(a.grad, 12), (moved.grad, 6)]


def captured(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    """A backward ends at the moved value, too."""
    moved = move(a, mesh, I, R)
    begin = moved * 2
    of_moved, of_a = torch.autograd.grad(begin, [moved, a], torch.full((2, 2), 3.0), retain_graph=True)
    return begin, lambda: [(of_moved, 6), (of_a, 12), (a.grad, 12)]


def twice(a: Tensor, b: Tensor, mesh: DeviceMesh) -> Any:
    """Sums on both ways."""
    total = move(move(a, mesh, I, R) * 1, mesh, P, R)
    return total, lambda: [(a.grad, 3 * RANKS**2)]


GRADIENTS: tuple[Case, ...] = (added, added_views, product, hooked, hooked_view, retained, captured, twice)


def misfits_of_gradients() -> list[str]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    found = []
    for case in GRADIENTS:
        a, b = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        begin, expected = case(a, b, mesh)
        given = torch.full((2, 2), 3.0)
        begin.backward(given)
        for value, number in [*expected(), (given, 3)]:
            if value is None or not torch.equal(value, torch.full_like(value, number)):
                found.append(f"{case.__name__}: {value}, not {number}")
    return found


def test_a_gradient_that_others_read_stays() -> None:
    assert on_ranks(RANKS, misfits_of_gradients) == [[]] * RANKS


class Down(nn.Linear):
    """Keeps what a case keeps of its output: (it, a copy)."""

    keeps: Callable[[Tensor], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if Down.keeps is not None:
            kept = Down.keeps(y)
            KEPT.append((kept, torch.as_tensor(kept).clone()))
        return y


KEPT: list[tuple[Any, Tensor]] = []


class Block(nn.Module):
    around: Callable[..., Any] = staticmethod(lambda run, x: run(x))  # how the layers are called

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), Down(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + type(self).around(lambda x: self.down(self.up(x).relu()).tanh_(), x)


def only_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


@contextmanager
def keeping(how: str) -> Iterator[None]:
    keeps: dict[str, Callable[[Tensor], object]] = {
        "the output": lambda y: y,
        "detached": torch.Tensor.detach,
        "a view": lambda y: y[0],
        "numpy": lambda y: y.detach().numpy(),
    }
    around = {
        "checkpoint": partial(checkpoint, use_reentrant=False),
        "re-entrant checkpoint": partial(checkpoint, use_reentrant=True),
        "products are kept": partial(checkpoint, use_reentrant=False, context_fn=only_products),
    }

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Down):
            KEPT.append((output, output.detach().clone()))

    handle = nn.modules.module.register_module_forward_hook(hook) if how == "a hook of all modules" else None
    before, Down.keeps = Block.around, keeps.get(how)
    Block.around = staticmethod(around.get(how, before))
    try:
        yield
    finally:
        Block.around, Down.keeps = staticmethod(before), None
        if handle is not None:
            handle.remove()


HOW = ("nothing", "the output", "detached", "a view", "numpy", "a hook of all modules")
AROUND = ("checkpoint", "re-entrant checkpoint", "products are kept")


def misfits_of_outputs() -> list[str]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))

    def made() -> nn.Module:
        torch.manual_seed(3)
        return Stack(Block)

    expected = made()
    expected(**tokens(1))["loss"].backward()
    found = []
    for how in (*HOW, *AROUND):
        with keeping(how):
            split = shardplan.apply_plan(made(), mesh, PLAN, prove=False)
            KEPT.clear()
            split(**tokens(1))["loss"].backward()
        if bool(KEPT) != (how in HOW[1:]):
            found.append(f"{how}: {len(KEPT)} are kept")
        found += [f"{how}: it changed" for kept, copy in KEPT if not torch.equal(torch.as_tensor(kept), copy)]
        gradients = {name: gradient for name, _, gradient in shardplan.full_parameters(split, gradients=True)}
        for name, parameter in expected.named_parameters():
            if not torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6):
                found.append(f"{how}: {name}")
    return found


def test_an_output_that_others_keep_stays() -> None:
    assert on_ranks(RANKS, misfits_of_outputs) == [[]] * RANKS
