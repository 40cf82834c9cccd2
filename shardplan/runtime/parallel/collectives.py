"""Collectives over the tp axis, on local tensors, inside autograd functions.

In a graph that is being compiled they are torch's functional collectives, in the form that inductor fuses with products.
Eager, they are the same operators, called below autograd and without the wrapper that waits at a tensor's first use. Called
like this they take a tenth of the host time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardplan.torchlib.operators import FUNCTIONAL, UNSAFE_VIEW
from shardplan.torchlib.private import private

from .chunks import chunk_size, pad_chunk, uneven
from .process_groups import Group, of_group, ranks_of

_below_autograd = private("below_autograd")
_wait = FUNCTIONAL.wait_tensor.default
_all_reduce, _all_reduce_in_place = FUNCTIONAL.all_reduce.default, FUNCTIONAL.all_reduce_.default
_all_gather = FUNCTIONAL.all_gather_into_tensor.default
_reduce_scatter = FUNCTIONAL.reduce_scatter_tensor.default
_traced = {name: private(name) for name in ("all_reduce", "all_gather", "reduce_scatter")}


def all_reduce(x: Tensor, mesh: Group, op: str = "sum", *, only: bool = False, wait: bool = True) -> Tensor:
    """The sum (or `op`) over the axis, a fresh tensor on every rank; without `wait` it is valid after `waited`.

    Args:
        only: nobody else can read `x`, so the sum may take its memory.
    """
    dense = x.contiguous()
    if torch.compiler.is_compiling():
        return _traced["all_reduce"](dense, op, mesh)
    operator = _all_reduce_in_place if only or dense is not x else _all_reduce
    return _run(operator, dense, op, of_group(mesh)[0], wait=wait)


def all_gather(x: Tensor, mesh: Group, dim: int, size: int | None = None) -> Tensor:
    """The chunks of all ranks along `dim`, alike, or ceil-chunks that are `size` long in all."""
    if size is None or size % (ranks := ranks_of(mesh)) == 0:
        return _gather(x, mesh, dim)
    padded = pad_chunk(x, dim, chunk_size(size, ranks))
    return _gather(padded, mesh, dim).narrow(dim, 0, size)


def reduce_scatter(x: Tensor, mesh: Group, dim: int, *, wait: bool = True) -> Tensor:
    """This rank's chunk along `dim` of the sum over the axis; without `wait` it is valid after `waited`.

    Raises:
        ValueError: the axis does not divide the dimension (gloo would abort, NCCL hang).
    """
    chunk, ranks = list(x.shape), ranks_of(mesh)
    size = chunk[dim]
    if size % ranks:
        raise uneven(size, dim, ranks)
    if torch.compiler.is_compiling():
        return _traced["reduce_scatter"](x.contiguous(), "sum", dim, mesh)
    dim %= len(chunk)
    chunk[dim] = size // ranks
    if prod(chunk[:dim]) > 1:  # concatenate the ranks' chunks: a copy
        x = x.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    stacked = x.reshape(ranks * chunk[0], *chunk[1:]).contiguous()
    return _run(_reduce_scatter, stacked, "sum", ranks, of_group(mesh)[0], wait=wait)


def waited(x: Tensor) -> Tensor:
    """The result of a collective that was called without `wait`, now valid."""
    with _below_autograd():
        return _wait(x)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Exchange rows: sends [sum of sent, ...], receives [sum of received, ...], both in rank order."""
    return _run(FUNCTIONAL.all_to_all_single.default, x.contiguous(), list(received), list(sent), of_group(group)[0])


def _gather(x: Tensor, mesh: Group, dim: int) -> Tensor:
    whole, ranks = list(x.shape), ranks_of(mesh)
    dim %= len(whole)
    first = prod(whole[:dim]) == 1
    whole[dim] *= ranks
    if torch.compiler.is_compiling():
        # Only the first dim: for other dims torch 2.11 makes a function that Dynamo refuses. The next line does that
        # function's work with the operators that asynchronous tensor parallelism fuses: split and cat.
        stacked = _traced["all_gather"](x.contiguous(), 0, mesh)
        return stacked.view(whole) if first else torch.cat(stacked.split(x.shape[0]), dim)
    stacked = _run(_all_gather, x.contiguous(), ranks, of_group(mesh)[0])
    if first:  # no copy, and no view: in-place changes stay possible
        return UNSAFE_VIEW(stacked, whole)
    return stacked.view(ranks, *x.shape).movedim(0, dim).reshape(whole)


def _run(operator: Any, x: Tensor, *args: Any, wait: bool = True) -> Tensor:
    assert not (x.requires_grad and torch.is_grad_enabled()), "a collective outside an autograd function"
    with _below_autograd():
        result = operator(x, *args)
        return _wait(result) if wait else result
