"""The move from a slice of one dim to a slice of another, against whole tensors: values, gradients, and the bytes that are sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardplan.core.layout import Layout, V
from shardplan.core.module_program import ParameterProgram
from shardplan.core.moves import MoveOps, Ranges, length_of, move_ops, ranges_of
from shardplan.proof.threads import on_threads
from shardplan.runtime.parallel.tensor_moves import move
from shardplan.torchlib.operators import FUNCTIONAL

BATCH, LENGTH = 2, 8
PACKED = ParameterProgram("weight", V(0), V(0), parts=(16, 8, 4))  # heads of several sizes, each split on its own
FEW = ParameterProgram(
    "weight", V(0), V(0), parts=(16, 4), copies=(1, 2)
)  # two heads of the second part have 2 ranks each, of 4


def shares_of(program: ParameterProgram, ranks: int) -> tuple[Ranges, ...]:
    return tuple(program.ranges(sum(program.parts), ranks, rank) for rank in range(ranks))


def taken(x: Tensor, ranges: Ranges) -> Tensor:
    return torch.cat([x[..., start : start + length] for start, length in ranges], -1)


CASES = {
    "even": (12, V(-1), None, (2, 4)),
    "copies of two": (8, Layout("V", -1, copies=2), None, (4,)),
    "uneven features": (10, V(-1), None, (4,)),
    "packed": (28, V(-1), PACKED, (2, 4)),
    "packed, with copies": (20, V(-1), FEW, (4,)),
}


class Received(TorchDispatchMode):
    """Counts the bytes that this rank gets from others in all-to-alls."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.bytes = rank, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is FUNCTIONAL.all_to_all_single.default:
            x, received = args[:2]
            self.bytes.append((sum(received) - received[self.rank]) * x.element_size())
        return func(*args, **(kwargs or {}))


def both_ways(rank: int, ranks: int, case: str) -> list[int]:
    """Compare a rank's values and gradients with the whole's. Returns the bytes that it got from others, there and back."""
    size, layout, program, _ = CASES[case]
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    shares = shares_of(program, ranks) if program is not None else None
    of_ranks = shares or ranges_of(layout, size, ranks)
    generator = torch.Generator().manual_seed(3)
    shape = (BATCH, LENGTH, size)
    whole, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 + ranks))
    with Received(rank) as received:
        x = whole.chunk(ranks, 1)[rank].clone().requires_grad_()
        y = move(x, mesh, V(1), layout, shares=shares)
        y.backward(taken(gradients[rank], of_ranks[rank]))
    torch.testing.assert_close(y.detach(), taken(whole, of_ranks[rank]), rtol=0, atol=0)
    expected = torch.zeros_like(whole)  # what several ranks read gets the sum of their gradients
    for ranges, gradient in zip(of_ranks, gradients, strict=True):
        for start, length in ranges:
            expected[..., start : start + length] += gradient[..., start : start + length]
    torch.testing.assert_close(x.grad, expected.chunk(ranks, 1)[rank])
    if sum(map(length_of, of_ranks)) == size:  # each place is on one rank: the way back
        z = taken(whole, of_ranks[rank]).requires_grad_()
        back = move(z, mesh, layout, V(1), size=size, shares=shares)
        torch.testing.assert_close(back.detach(), whole.chunk(ranks, 1)[rank], rtol=0, atol=0)
        back.backward(gradients[0].chunk(ranks, 1)[rank])
        torch.testing.assert_close(z.grad, taken(gradients[0], of_ranks[rank]), rtol=0, atol=0)
    return received.bytes


def sent_bytes(ranks: int, case: str) -> list[list[int]]:
    """What each rank gets in a forward and a backward: of its share the tokens of the others, and of its tokens their shares."""
    size, layout, program, _ = CASES[case]
    of_ranks = shares_of(program, ranks) if program is not None else ranges_of(layout, size, ranks)
    lengths, tokens = list(map(length_of, of_ranks)), LENGTH // ranks
    return [[8 * BATCH * tokens * (ranks - 1) * own, 8 * BATCH * tokens * (sum(lengths) - own)] for own in lengths]


@pytest.mark.parametrize(
    ("case", "ranks"), [(case, ranks) for case, (*_, several) in CASES.items() for ranks in several]
)
def test_threads(case: str, ranks: int) -> None:
    assert on_threads(ranks, lambda rank: both_ways(rank, ranks, case)) == sent_bytes(ranks, case)


def all_cases(ranks: int) -> dict[str, list[int]]:
    return {case: both_ways(dist.get_rank(), ranks, case) for case, (*_, several) in CASES.items() if ranks in several}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes(ranks: int) -> None:
    for rank, found in enumerate(on_ranks(ranks, all_cases, ranks)):
        assert found == {case: sent_bytes(ranks, case)[rank] for case in found}
        assert len(found) == sum(ranks in several for *_, several in CASES.values())


def test_a_sequence_that_the_axis_does_not_divide() -> None:
    def call(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        with pytest.raises(ValueError, match="dim 1 has 7 elements") as raised:
            move(torch.ones(1, 7, 4), mesh, V(-1), V(1))
        return str(raised.value)

    assert len(set(on_threads(2, call))) == 1


def test_what_is_no_exchange() -> None:
    assert move_ops(V(1), V(-1)) == move_ops(V(-1), V(1)) == MoveOps("all_to_all", "all_to_all")
    shared = Layout("V", -1, copies=2)
    assert move_ops(V(1), shared) is not None
    assert move_ops(shared, V(1)) is None  # which rank's slice would count?
    assert move_ops(V(-1), shared) == MoveOps("all_gather", "reduce_scatter")
