"""The one primitive on local tensors: `move(x, src, dst)` over the tp axis, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import Layout
from shardplan.core.moves import MoveOps, Operation, Ranges, covered, move_ops, ranges_of
from shardplan.torchlib.direct_function import DirectFunction

from .chunks import own_chunk, uneven
from .collectives import all_gather, all_reduce, reduce_scatter, waited
from .dim_exchange import Cut, exchange_dims
from .later_weights import Later
from .process_groups import ranks_of
from .references import only_gradient
from .second_derivatives import refuse_second_derivatives


def _slice(x: Tensor, mesh: DeviceMesh, dim: int, size: int | None) -> Tensor:
    return own_chunk(x, dim, mesh)


def _pad(x: Tensor, mesh: DeviceMesh, dim: int, size: int | None) -> Tensor:
    whole = list(x.shape)
    whole[dim] = whole[dim] * mesh.size() if size is None else size
    result = x.new_zeros(whole)
    own_chunk(result, dim, mesh).copy_(x)
    return result


# Each takes (x, mesh, dim, size of the whole dim or None). A change of the split dim is `exchange_dims`.
OPERATIONS: dict[Operation, Callable[[Tensor, DeviceMesh, int, int | None], Tensor]] = {
    "identity": lambda x, mesh, dim, size: x,
    "all_reduce": lambda x, mesh, dim, size: all_reduce(x, mesh),
    "all_gather": all_gather,
    "reduce_scatter": lambda x, mesh, dim, size: reduce_scatter(x, mesh, dim),
    "slice": _slice,
    "pad": _pad,
    "divide": lambda x, mesh, dim, size: x / mesh.size(),
}
# Operations that only begin: their result is valid after `waited`. The last argument: nobody else can read the value.
BEGUN: dict[Operation, Callable[[Tensor, DeviceMesh, int, bool], Tensor]] = {
    "all_reduce": lambda x, mesh, dim, only: all_reduce(x, mesh, only=only, wait=False),
    "reduce_scatter": lambda x, mesh, dim, only: reduce_scatter(x, mesh, dim, wait=False),
}


class _How(NamedTuple):
    """How a tensor moves: one argument, as each costs the host.

    Args:
        size: the length of the whole dim; None: the axis divides it.
        only: nobody else can read the tensor.
    """

    mesh: DeviceMesh
    ops: MoveOps
    dim: int
    size: int | None
    only: bool = False


def _same_values(x: Tensor) -> Tensor:
    """What a function returns that changes gradients alone: a view; in a graph of torch.compile a copy. Where a graph returns several views of
    one value, AOTAutograd makes them again outside of it, and their functions' backwards do not run (torch 2.13)."""
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)


class _Move(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _How) -> Tensor:
        ctx.how = how
        mesh, ops, dim, size, only = how
        if only:  # under another tensor, which is no view: in-place changes stay possible
            return all_reduce(x.detach(), mesh, only=True)
        y = OPERATIONS[ops.forward](x, mesh, dim, size)
        if (
            ops.forward == "slice"
        ):  # a view forbids changes in place (`hidden_states *= scale`), and keeps all of x alive
            return y.clone(memory_format=torch.contiguous_format)
        return _same_values(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        mesh, ops, dim, size, _ = ctx.how
        if ops.backward == "all_reduce" and only_gradient(gradient):
            return all_reduce(gradient, mesh, only=True), None
        return OPERATIONS[ops.backward](gradient, mesh, dim, size), None


class _MoveOver(DirectFunction):
    """A move whose backward computes gradients of weights while the gradient of the value is reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: tuple[_How, Later], *weights: Tensor) -> Tensor:
        ctx.how, ctx.later = how  # layers that read the result look for it (`later_weights`)
        mesh, ops, dim, size, _ = ctx.how
        y = OPERATIONS[ops.forward](x, mesh, dim, size)
        ctx.save_for_backward(y)  # where it is x: an input costs the host less than an output
        return y.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        mesh, ops, dim, *_ = ctx.how
        only = ops.backward == "all_reduce" and only_gradient(gradient)
        begun = BEGUN[ops.backward](gradient, mesh, dim, only)
        weights = ctx.later.gradients(lambda: ctx.saved_tensors[0], ctx.needs_input_grad[2:])
        return waited(begun), None, *weights


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, had: Cut, wanted: Cut) -> Tensor:
        ctx.back = (mesh, wanted, had)
        return exchange_dims(x, mesh, had, wanted)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return exchange_dims(gradient, *ctx.back), None, None, None


class Move:
    """A move of local tensors from one layout to another. Boundaries prepare theirs once.

    Args:
        mesh: the one-dimensional tp mesh.
        src: the layout of a tensor. Its gradient returns in the layout that this defines (core/layout.py).
        dst: the layout of the result. V's dim may be negative; SEQ must have been replaced.
        size: the length of the whole dim if a V is a chunk of it. Needed only where the axis does not divide it.
        shares: for a move from V(d) to V(e): each rank's part of the last dim, if it is not a chunk (a share of each part of packed
            features).
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        src: Layout,
        dst: Layout,
        size: int | None = None,
        shares: tuple[Ranges, ...] | None = None,
    ):
        ops = move_ops(src, dst)
        assert ops is not None, f"no move {src} -> {dst}"
        self.mesh, self.src, self.dst, self.ops, self.size, self.shares = mesh, src, dst, ops, size, shares
        self.nothing = ops.forward == ops.backward == "identity"
        self.exchanges = ops.forward == "all_to_all"
        self.over = ops.backward in BEGUN
        self.split = src if src.kind == "V" else dst
        # Where it depends on no shape.
        self.how = _How(mesh, ops, 0, 0) if self.split.kind != "V" else None
        self.in_place = _How(mesh, ops, 0, 0, only=True) if ops.forward == "all_reduce" else None

    def __call__(self, x: Tensor, later: Later | None = None, *, only: bool = False) -> Tensor:
        """
        Args:
            x: this rank's local tensor.
            later: what readers of the result leave to this move, if its gradient is reduced.
            only: nobody else can read `x`, which is all-reduced.

        Raises:
            ValueError: the axis does not divide a sequence, and the size is missing.
        """
        if self.nothing:
            return x
        if self.exchanges:
            return _Exchange.apply(
                x, self.mesh, *_cuts(x, self.mesh.size(), self.src, self.dst, self.size, self.shares)
            )
        how = self.in_place if only else self.how
        if how is None:
            dim, size = self.split.split_dim(x.ndim), self.size
            if size is None and self.dst.kind == "V":
                size, ranks = x.shape[dim], ranks_of(self.mesh)
                if size % ranks and dim != x.ndim - 1:
                    raise uneven(size, dim, ranks)
            how = _How(self.mesh, self.ops, dim, size)
        if later is not None and self.over:
            return _MoveOver.apply(x, (how, later), *later.weights)
        return _Move.apply(x, how)


def move(
    x: Tensor,
    mesh: DeviceMesh,
    src: Layout,
    dst: Layout,
    *,
    size: int | None = None,
    shares: tuple[Ranges, ...] | None = None,
) -> Tensor:
    """Move one local tensor: `Move` says how."""
    return Move(mesh, src, dst, size, shares)(x)


def _cuts(
    x: Tensor, ranks: int, src: Layout, dst: Layout, size: int | None, shares: tuple[Ranges, ...] | None
) -> tuple[Cut, Cut]:
    """Each rank's part before, and after."""
    had, wanted, last = src.split_dim(x.ndim), dst.split_dim(x.ndim), x.ndim - 1
    if wanted != last and x.shape[wanted] % ranks:
        raise uneven(x.shape[wanted], wanted, ranks)
    if size is None:
        size = covered(shares) if shares is not None and had == last else x.shape[had] * ranks
    before, after = ranges_of(src, size, ranks), ranges_of(dst, x.shape[wanted], ranks)
    if shares is not None and last in (had, wanted):
        before, after = (shares, after) if had == last else (before, shares)
    return Cut(had, size, before), Cut(wanted, x.shape[wanted], after)


def summed(mesh: DeviceMesh, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """The sums of partial sums over the ranks, by one all-reduce (in `dtype`; None: their own)."""
    total = all_reduce(torch.cat([x.reshape(-1).to(dtype or x.dtype) for x in tensors]), mesh, only=True)
    parts = total.split([x.numel() for x in tensors])
    return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True)]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.dtype = mesh, dtype
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return None, None, *summed(ctx.mesh, gradients, ctx.dtype)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return _same_values(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return gradient * ctx.factor, None


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    """The unchanged tensor; in backward its gradient is multiplied."""
    return x if isinstance(factor, float) and factor == 1.0 else _ScaleGradient.apply(x, factor)


def sum_gradients(mesh: DeviceMesh, tensors: list[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The unchanged tensors; in backward their gradients, partial sums, are summed by one all-reduce.

    Args:
        mesh: the one-dimensional tp mesh.
        tensors: whole copies, equal on all ranks.
        dtype: the dtype of the reduction; None is the gradients' own.
    """
    return _SumGradients.apply(mesh, dtype, *tensors)
