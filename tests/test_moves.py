"""The one primitive, on all ranks at once: what `move` does to a value and to its gradient, against the definition."""

from __future__ import annotations

import pytest
import torch

from shardplan.core.layout import I, Layout, P, R, V
from shardplan.core.moves import MOVES, move_ops
from shardplan.runtime.parallel.chunks import chunk_size, own_chunk
from shardplan.runtime.parallel.tensor_moves import move
from shardplan.torchlib.packing import pack, packed_order, unpack
from tests.proofs import fake_mesh
from tests.simulation import LocalTensor, on_every_rank, rank_values, simulated_mesh

TP = 4
PAIRS = sorted(pair for pair, ops in MOVES.items() if ops.forward != "all_to_all")  # those: test_dim_exchange.py


def layout(kind: str, dim: int) -> Layout:
    return V(dim) if kind == "V" else Layout(kind)


def spread(whole: torch.Tensor, layout: Layout, generator: torch.Generator) -> dict[int, torch.Tensor]:
    """What the ranks hold if the whole tensor has that layout: the definition of I, R, V and P as values."""
    if layout.kind in ("I", "R"):
        return {rank: whole.clone() for rank in range(TP)}
    if layout.kind == "V":
        size = whole.shape[layout.dim]
        chunk = chunk_size(size, TP)
        starts = [min(rank * chunk, size) for rank in range(TP)]
        return {r: whole.narrow(layout.dim, s, min(chunk, size - s)).clone() for r, s in enumerate(starts)}
    parts = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(TP - 1)]
    return dict(enumerate([*parts, whole - sum(parts)]))


def whole(values: dict[int, torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor that the ranks' values mean; they must agree where the layout says so."""
    if layout.kind == "V":
        return torch.cat([values[rank] for rank in range(TP)], layout.dim)
    if layout.kind == "P":
        return sum(values.values())
    for value in values.values():
        torch.testing.assert_close(value, values[0], rtol=0, atol=1e-12)
    return values[0]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_a_move_changes_the_layout_and_neither_the_value_nor_the_gradient(pair, dim):
    """The value before and after mean the same tensor; so do the gradients, in the layouts that the types promise."""
    src, dst = layout(pair[0], dim), layout(pair[1], dim)
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(2, 8, 12, generator=generator, dtype=torch.float64)
    gradient = torch.randn(2, 8, 12, generator=generator, dtype=torch.float64)
    with simulated_mesh(TP) as mesh:
        x = LocalTensor(spread(value, src, generator)).requires_grad_()
        y = move(x, mesh, src, dst)
        y.backward(LocalTensor(spread(gradient, dst.gradient, generator)))
    torch.testing.assert_close(whole(rank_values(y.detach()), dst), value)
    torch.testing.assert_close(whole(rank_values(x.grad), src.gradient), gradient)


@pytest.mark.parametrize("size", [9, 10, 13])
@pytest.mark.parametrize("pair", [("V", "I"), ("I", "V"), ("R", "V")], ids=" to ".join)
def test_uneven_chunks_of_the_last_dim(pair, size):
    src, dst = layout(pair[0], -1), layout(pair[1], -1)
    generator = torch.Generator().manual_seed(6)
    value, gradient = (torch.randn(2, size, generator=generator, dtype=torch.float64) for _ in range(2))
    with simulated_mesh(TP) as mesh:
        x = LocalTensor(spread(value, src, generator)).requires_grad_()
        y = move(x, mesh, src, dst, size=size)
        y.backward(LocalTensor(spread(gradient, dst.gradient, generator)))
    torch.testing.assert_close(whole(rank_values(y.detach()), dst), value)
    torch.testing.assert_close(whole(rank_values(x.grad), src.gradient), gradient)


def test_what_is_no_move():
    assert move_ops(V(1), P) is None and move_ops(P, V(1)) is not None
    for same in (I, R, P, V(1)):
        assert move_ops(same, same).forward == move_ops(same, same).backward == "identity"


@pytest.mark.parametrize("src", [I, R, P], ids=str)
def test_a_sequence_that_tp_does_not_divide_is_refused_with_the_padded_length(src):
    with simulated_mesh(TP) as mesh:
        x = LocalTensor({rank: torch.ones(1, 10, 3) for rank in range(TP)})
        with pytest.raises(
            ValueError, match="dim 1 has 10 elements, which tp=4 does not divide: pad it to 12"
        ) as raised:
            move(x, mesh, src, V(1))
    assert "`shardplan.pad_to_multiple(batch, 4, pad_token_id=...)` pads input_ids" in str(raised.value)
    assert "`with shardplan.without_sequence_parallel(model):`" in str(raised.value)


def test_chunks_are_those_of_dtensor():
    """One formula for embedding, head and loss, and DTensor's own."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for size in (8, 9, 10, 11, 12, 13, 67):
        x = torch.arange(size)
        with simulated_mesh(TP) as mesh:
            mine = own_chunk(on_every_rank(x, TP), 0, mesh)
            torchs = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).to_local()
        for rank in range(TP):
            assert rank_values(mine)[rank].equal(rank_values(torchs)[rank]), (size, rank)


@pytest.mark.parametrize(("parts", "ranks"), [((6, 6), 2), ((8, 4, 4), 2), ((8, 4, 4), 4), ((12,), 3)])
def test_every_ranks_slice_of_packed_rows_holds_its_share_of_each_part(parts, ranks):
    rows = torch.cat([torch.arange(size) + 100 * part for part, size in enumerate(parts)])
    slices = rows[packed_order(parts, ranks)].chunk(ranks)
    for rank, mine in enumerate(slices):
        expected = [torch.arange(size).chunk(ranks)[rank] + 100 * part for part, size in enumerate(parts)]
        assert mine.equal(torch.cat(expected))
    x = torch.randn(3, len(rows))
    assert unpack(pack(x, 1, parts, ranks), 1, parts, ranks).equal(x)


def test_what_a_slice_gives_may_be_written_into():
    """Code scales the stream in place (`hidden_states *= scale`), which a view made by an autograd function would not allow."""
    value = torch.randn(2, 8, 12, dtype=torch.float64)
    with simulated_mesh(TP) as mesh:
        x = LocalTensor(spread(value, I, torch.Generator())).requires_grad_()
        y = move(x, mesh, I, V(1))
        y *= 3
        y.sum().backward()
    torch.testing.assert_close(whole(rank_values(y.detach()), V(1)), 3 * value)
    torch.testing.assert_close(whole(rank_values(x.grad), I), torch.full_like(value, 3))


@pytest.mark.slow  # the first graph of a process takes seconds
def test_a_graph_that_returns_a_value_and_its_move_divides_the_gradient() -> None:
    """AOTAutograd returns views of one value as views made anew, without their functions."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = x * 3
        return move(value, mesh, R, I), value

    with fake_mesh(2) as mesh:
        for run in (both, torch.compile(both, backend="aot_eager")):
            x = torch.ones(4, requires_grad=True)
            sum(one.sum() for one in run(x)).backward()
            assert x.grad is not None and x.grad.tolist() == [4.5] * 4
