"""The one primitive on local tensors: `move(x, src, dst)` over the tp axis, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import Layout
from shardplan.core.moves import Operation, move_ops

from .chunks import chunk_size, own_chunk, pad_chunk
from .meshes import Group
from .private import private

_all_reduce = private("all_reduce")
_all_gather = private("all_gather")
_reduce_scatter = private("reduce_scatter")
_wait_tensor = private("wait_tensor")


def _wait(x: Tensor) -> Tensor:
    """The result of a collective. In a graph that is being compiled torch waits by itself; a second time would stand between
    the collective and the product that inductor fuses with it."""
    return x if torch.compiler.is_compiling() else _wait_tensor(x)


def all_reduce(x: Tensor, mesh: Group, op: str = "sum") -> Tensor:
    """The sum (or `op`) over the axis, a fresh tensor on every rank."""
    return _wait(_all_reduce(x.contiguous(), op, mesh))


def all_gather(x: Tensor, mesh: Group, dim: int, size: int) -> Tensor:
    """The chunks of all ranks along `dim`, `size` long in all; chunks may be uneven (ceil-chunks)."""
    if size % mesh.size() == 0:
        return _wait(_all_gather(x.contiguous(), dim, mesh))
    padded = pad_chunk(x, dim, chunk_size(size, mesh.size())).contiguous()
    return _wait(_all_gather(padded, dim, mesh)).narrow(dim, 0, size)


def reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's chunk along `dim` of the sum over the axis.

    Raises:
        ValueError: the axis does not divide the dimension (gloo would abort, NCCL hang).
    """
    size, ranks = x.shape[dim], mesh.size()
    if size % ranks:
        padded = chunk_size(size, ranks) * ranks
        raise ValueError(
            f"dim {dim} has {size} elements, which tp={ranks} does not divide: pad it to {padded} "
            "(sequence parallelism splits the sequence evenly)"
        )
    return _wait(_reduce_scatter(x.contiguous(), "sum", dim, mesh))


def _slice(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    return own_chunk(x, dim, mesh)


def _pad(x: Tensor, mesh: DeviceMesh, dim: int, size: int) -> Tensor:
    whole = list(x.shape)
    whole[dim] = size
    result = x.new_zeros(whole)
    own_chunk(result, dim, mesh).copy_(x)
    return result


# Each takes (x, mesh, dim, size of the whole dim).
OPERATIONS: dict[Operation, Callable[[Tensor, DeviceMesh, int, int], Tensor]] = {
    "identity": lambda x, mesh, dim, size: x,
    "all_reduce": lambda x, mesh, dim, size: all_reduce(x, mesh),
    "all_gather": all_gather,
    "reduce_scatter": lambda x, mesh, dim, size: reduce_scatter(x, mesh, dim),
    "slice": _slice,
    "pad": _pad,
    "divide": lambda x, mesh, dim, size: x / mesh.size(),
}


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh, forward, backward, dim, size):
        ctx.move = (mesh, backward, dim, size)
        y = OPERATIONS[forward](x, mesh, dim, size)
        return y.view_as(x) if y is x else y

    @staticmethod
    def backward(ctx, gradient):
        mesh, backward, dim, size = ctx.move
        return OPERATIONS[backward](gradient, mesh, dim, size), None, None, None, None, None


def move(x: Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, *, size: int | None = None) -> Tensor:
    """Move a local tensor from one layout to another; its gradient comes back as `src` promises (core/layout.py).

    Args:
        x: this rank's local tensor.
        mesh: the one-dimensional tp mesh.
        src: the layout of `x`.
        dst: the layout of the result. V's dim may be negative; SEQ must have been replaced.
        size: the length of the whole dim that a V is a chunk of. Needed only where the axis does not divide it.

    Raises:
        ValueError: a sequence that the axis does not divide.
    """
    ops = move_ops(src, dst)
    assert ops is not None, f"no move {src} -> {dst}"
    if ops.forward == ops.backward == "identity":
        return x
    sharded = src if src.kind == "V" else dst
    dim, whole = 0, 0
    if sharded.kind == "V":
        dim = sharded.dim % x.ndim
        whole = size if size is not None else x.shape[dim] * (mesh.size() if src.kind == "V" else 1)
        if dst.kind == "V" and x.shape[dim] % mesh.size() and dim != x.ndim - 1:
            raise ValueError(
                f"dim {dim} has {x.shape[dim]} elements, which tp={mesh.size()} does not divide: pad it to "
                f"{chunk_size(x.shape[dim], mesh.size()) * mesh.size()} (sequence parallelism splits it evenly)"
            )
    return _Move.apply(x, mesh, ops.forward, ops.backward, dim, whole)


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mesh, dtype, *tensors):
        ctx.mesh, ctx.dtype = mesh, dtype
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        flat = torch.cat([g.reshape(-1).to(ctx.dtype or g.dtype) for g in gradients])
        total = all_reduce(flat, ctx.mesh)
        parts = total.split([g.numel() for g in gradients])
        return (None, None, *(part.view(g.shape).to(g.dtype) for part, g in zip(parts, gradients, strict=True)))


def sum_gradients(mesh: DeviceMesh, tensors: list[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The tensors, unchanged; in backward their gradients, partial sums, are summed by one all-reduce.

    Args:
        mesh: the one-dimensional tp mesh.
        tensors: whole copies, equal on all ranks.
        dtype: the dtype of the reduction; None is the gradients' own.
    """
    return _SumGradients.apply(mesh, dtype, *tensors)
