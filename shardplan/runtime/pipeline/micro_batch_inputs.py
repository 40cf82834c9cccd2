"""The arguments of a step, divided for the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

from shardplan.torchlib.private import private

_tree_map, _tree_leaves = private("tree_map"), private("tree_leaves")

NO_CACHE = "a stage keeps no cache: evaluate losses, or generate with an unsharded model"
REFUSED = {
    "use_cache": NO_CACHE,
    "past_key_values": NO_CACHE,
    "cache": NO_CACHE,
    "cache_params": NO_CACHE,
    "output_hidden_states": "the hidden states of other stages are on other ranks",
    "output_attentions": "the attention maps of other stages are on other ranks",
    "return_dict": "step returns the loss",
    "inputs_embeds": "only the first stage would read them: pass input_ids",
}


# The bounds of packed sequences, by the names that transformers declares.
PACKED = frozenset(FlashAttentionKwargs.__annotations__)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a step.

    Args:
        tensors: by argument name; the first dim of each is the batch.
        constants: the other arguments, the same for each micro-batch.
        rows: the rows of the batch.
    """

    tensors: Mapping[str, Any]
    constants: Mapping[str, Any]
    rows: int

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """The shapes of the arguments, which determine the shapes of hand-overs."""
        return tuple((name, tuple(x.shape), x.dtype) for name, value in self.tensors.items() for x in _tensors(value))

    def split(self, micro_batches: int) -> list[dict[str, Any]]:
        """The micro-batches."""
        if micro_batches == 1:
            return [dict(self.tensors)]
        rows = self.rows // micro_batches
        places = [slice(i * rows, (i + 1) * rows) for i in range(micro_batches)]
        return [
            {name: _mapped(value, partial(_rows, place)) for name, value in self.tensors.items()} for place in places
        ]


def flags_of(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The numbers and strings among values, which can be compared between ranks."""
    return tuple((name, value) for name, value in values.items() if isinstance(value, bool | int | float | str))


def _bounds(x: Tensor, others: Iterable[Tensor], rows: int) -> str:
    """Whether numbers are the bounds of packed sequences, ascending from 0: "row" for bounds within every row, "batch" for bounds within
    the whole batch (all tokens, or those of a mask), else "".

    Args:
        others: the tensors of the batch.
    """
    if x.ndim != 1 or len(x) < 2 or x.is_floating_point() or x.dtype == torch.bool:
        return ""
    found = x.tolist()
    if found[0] != 0 or found != sorted(found):
        return ""
    grids = [y for y in others if y.ndim == 2 and y.shape[0] == rows and not y.is_floating_point()]
    if any(found[-1] == y.shape[1] for y in grids):
        return "row"
    return "batch" if any(found[-1] in (y.numel(), int((y != 0).sum())) for y in grids) else ""


def _rows(place: slice, x: Tensor) -> Tensor:
    return x[place]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value: a tensor, a dict of masks, or a list."""
    return [x for x in _tree_leaves(value) if isinstance(x, Tensor)]


def _is_cache(value: Any) -> bool:
    return isinstance(value, Cache)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return _tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, value)


def read_inputs(arguments: Mapping[str, Any], micro_batches: int) -> Inputs:
    """Sort the arguments of a step.

    A tensor whose first dim is 1 is the same for all rows. A single micro-batch gets all tensors unchanged.

    Raises:
        ValueError: no tensors; the micro-batches do not divide the batch; a tensor has another first dim, or its values show that
            its first dim is not the batch; an argument has no meaning for a stage.
    """
    for name, why in REFUSED.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} in a pipeline step: {why}")
    for name, value in arguments.items():
        if any(map(_is_cache, _tree_leaves(value, is_leaf=_is_cache))):
            raise ValueError(f"{name} in a pipeline step: {NO_CACHE}")
    given = {name: value for name, value in arguments.items() if name not in REFUSED and value is not None}
    shown = {name: found[0] for name, value in given.items() if (found := _tensors(value))}
    if not shown:
        raise ValueError("a pipeline step needs the batch by keywords: input_ids=..., labels=...")
    leading = next((name for name in ("input_ids", "labels") if name in shown), next(iter(shown)))
    rows = shown[leading].shape[0] if shown[leading].ndim else 0
    if rows == 0 or rows % micro_batches:
        raise ValueError(
            f"{leading} has {rows} rows, which {micro_batches} micro-batches do not divide: pad the batch, or choose another "
            "micro_batches"
        )

    def whole(name: str, x: Tensor) -> Tensor:
        if micro_batches > 1 and (name in PACKED or _bounds(x, shown.values(), rows)):
            raise ValueError(
                f"{name} {tuple(x.shape)} has the bounds of packed sequences, which belong to no row: it cannot be divided into "
                "micro-batches. Use micro_batches=1, or rows of one sequence each with an attention_mask"
            )
        if x.ndim and x.shape[0] == rows:
            return x
        if x.ndim and x.shape[0] == 1:
            return x.expand(rows, *x.shape[1:])
        if micro_batches == 1:
            return x
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: its first dim must be the batch of {rows} rows, or 1")

    of_rows = [name for name in PACKED & shown.keys() if _bounds(given[name], shown.values(), rows) == "row"]
    shown = {name: x for name, x in shown.items() if name not in of_rows or micro_batches == 1}
    tensors = {name: _mapped(given[name], partial(whole, name)) for name in shown}
    return Inputs(tensors, {name: value for name, value in given.items() if name not in shown}, rows)
