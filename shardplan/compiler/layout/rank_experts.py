"""Calls of a module of experts: the role of each argument, and what one rank's experts add to the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def roles(arguments: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The tokens [..., H], the ids [..., k] of each token's experts, and their weights [..., k] in a call; None if its
    tensors are others."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    ids = [x for x in tensors if not x.is_floating_point() and x.dtype is not torch.bool]
    floats = [x for x in tensors if x.is_floating_point()]
    if len(ids) != 1 or len(floats) != 2 or ids[0].ndim < 2:
        return None
    weights = [x for x in floats[1:] if x.shape == ids[0].shape]
    tokens = floats[0]
    if not weights or tokens.shape[:-1] != ids[0].shape[:-1]:
        return None
    return tokens, ids[0], weights[0]


def in_rows(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same with the tokens in one row: [T, ...]."""
    return (value.reshape(-1, value.shape[-1]) for value in values)


def of_dims(rows: Tensor, dims: int) -> Tensor:
    """Rows [T, ...] with as many dims as the module's call has: [1, ..., T, ...]."""
    return rows.reshape(*(1,) * (dims - rows.ndim), *rows.shape)


def distribute_experts(module: nn.Module, count: int, ranks: int, rank: int) -> None:
    """Make the module compute what a rank's chunk of `count` experts adds to each token. The module's parameters are
    then the stacks of that chunk."""
    own = module.forward
    size = count // ranks
    if getattr(module, "num_experts", None) == count:
        vars(module)["num_experts"] = size

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        found = roles((*args, *kwargs.values()))
        if found is None:
            raise ValueError(NO_ROLES)
        (tokens, ids, weights), shape = in_rows(found), found[0].shape
        result = torch.zeros_like(tokens)
        for expert in range(size):
            token, slot = torch.where(ids == rank * size + expert)
            local = torch.full((len(token), 1), expert, dtype=ids.dtype)
            if len(token):
                rows = (tokens[token], local, weights[token, slot].unsqueeze(1))
                added = own(*(of_dims(one, len(shape)) for one in rows))
                result = result.index_add(0, token, added.reshape(-1, shape[-1]))
        return result.reshape(shape)

    module.forward = forward


NO_ROLES = "its arguments are not exactly tokens [..., H], expert ids [..., k] and weights [..., k]"
