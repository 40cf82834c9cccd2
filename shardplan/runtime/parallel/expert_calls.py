"""A call of a module of experts: which arguments are the tokens, their experts' ids, and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCall:
    """A call of a module of experts.

    Args:
        module: its name.
        tokens: [T, H].
        ids: of each token's experts, [T, k].
        weights: of their results, [T, k].
        shape: the original shape of the tokens and the result.
        args: the positional arguments as passed; (tokens, ids, weights) are at `places`.
        kwargs: the keyword arguments.
        places: the position or keyword of each.
    """

    module: str
    tokens: Tensor
    ids: Tensor
    weights: Tensor
    shape: torch.Size
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: tuple[int | str, ...]

    def with_rows(self, rows: Tensor, ids: Tensor, weights: Tensor) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the same call with other rows as tokens, ids and weights, in as many dims as the call
        has: [1, ..., R, H]."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, value in zip(self.places, (rows, ids, weights), strict=True):
            for _ in self.shape[2:]:
                value = value.unsqueeze(0)
            if isinstance(place, int):
                args[place] = value
            else:
                kwargs[place] = value
        return args, kwargs


def expert_call(module: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertCall:
    """Find the roles of the arguments by dtype and shape; leading dims are flattened.

    Args:
        module: the module's name, for messages.
        args: the positional arguments; with `kwargs` they are exactly three tensors, and None.
        kwargs: the keyword arguments.

    Raises:
        ValueError: they are not tokens [..., H], integer ids [..., k] and weights [..., k].
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in arguments:
        if not isinstance(value, Tensor) and value is not None:
            _refuse(module, f"its argument {place!r} is a {type(value).__name__}")
    tensors = {place: value for place, value in arguments if value is not None}
    integers = [place for place, x in tensors.items() if _is_integer(x)]
    floating = [place for place, x in tensors.items() if x.is_floating_point()]
    if len(integers) != 1:
        _refuse(module, f"it has {len(integers) or 'no'} integer tensors, and needs one, the expert ids")
    (at_ids,) = integers
    shape = tensors[at_ids].shape
    alike = [place for place in floating if tensors[place].shape == shape]
    if len(alike) != 1:
        found = "no tensor" if not alike else f"{len(alike)} tensors"
        _refuse(module, f"{found} can be its weights, which have the shape of the ids, {list(shape)}")
    (at_weights,) = alike
    others = [place for place in tensors if place not in (at_ids, at_weights)]
    if len(others) != 1 or others[0] not in floating:
        _refuse(module, f"besides ids and weights it has {len(others) or 'no'} tensors, and needs one, the tokens")
    (at_tokens,) = others
    tokens = tensors[at_tokens]
    if tokens.ndim < 2 or tokens.shape[:-1] != shape[:-1]:
        _refuse(
            module,
            f"its tokens have the shape {list(tokens.shape)} and its ids {list(shape)}: each token needs a list of ids",
        )
    places = (at_tokens, at_ids, at_weights)
    flat = [tensors[place].reshape(-1, tensors[place].shape[-1]) for place in places]
    return ExpertCall(module, flat[0], flat[1], flat[2], tokens.shape, tuple(args), dict(kwargs), places)


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _refuse(module: str, why: str) -> NoReturn:
    raise ValueError(
        "distributed experts are called with tokens [..., H], integer expert ids [..., k] and weights [..., k], but the call of "
        f"{module or '<model>'} is different: {why}"
    )
