"""Calls of a module of experts: which argument is which, and what one rank's experts add to the result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def roles(arguments: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The tokens [T, H], the ids [T, k] of each token's experts, and their weights [T, k] in a call; None where it has not
    just these tensors."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    ids = [x for x in tensors if not x.is_floating_point() and x.dtype is not torch.bool]
    floats = [x for x in tensors if x.is_floating_point()]
    if len(ids) != 1 or len(floats) != 2 or ids[0].ndim != 2:
        return None
    weights = [x for x in floats[1:] if x.shape == ids[0].shape]
    tokens = floats[0]
    if not weights or tokens.ndim != 2 or len(tokens) != len(ids[0]):
        return None
    return tokens, ids[0], weights[0]


def distribute_experts(module: nn.Module, count: int, ranks: int, rank: int) -> None:
    """The module computes what a rank's experts add to each token: of `count` experts, those of its chunk, whose stacks the
    module's parameters are then."""
    own = module.forward
    size = count // ranks
    if getattr(module, "num_experts", None) == count:
        vars(module)["num_experts"] = size

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        found = roles((*args, *kwargs.values()))
        if found is None:
            raise ValueError(NO_ROLES)
        tokens, ids, weights = found
        result = torch.zeros_like(tokens)
        for expert in range(size):
            token, slot = torch.where(ids == rank * size + expert)
            local = torch.full((len(token), 1), expert, dtype=ids.dtype)
            if len(token):
                added = own(tokens[token], local, weights[token, slot].unsqueeze(1))
                result = result.index_add(0, token, added)
        return result

    module.forward = forward


NO_ROLES = "its call has not just tokens [T, H], the ids [T, k] of their experts and weights [T, k]"
