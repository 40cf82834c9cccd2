"""The tensors of a model over a job's ranks: which boxes each rank holds, and tensors whose boxes exist once they were sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor, nn

from shardplan.runtime.apply.applied import was_touched
from shardplan.runtime.apply.model_parts import parts_of
from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.local_parts import to_local_if_dtensor

from .checkpoint_names import inner_model, kept_name, saved_names
from .lazy import Box, Expression, Lazy, lazy
from .ranges import Ranges, boxes_of
from .stored_parts import StoredPart, part_of, ranges_of


@dataclass(frozen=True)
class Own:
    """A tensor of a model, and this rank's part of it.

    Args:
        names: several for a tied tensor.
        tensor: the parameter or buffer, which may be a DTensor.
        ranges: this rank's, in the whole tensor.
    """

    names: tuple[str, ...]
    tensor: Tensor
    ranges: tuple[Ranges, ...]

    @property
    def described(self) -> Described:
        return self.names, tuple(self.tensor.shape), self.tensor.dtype, self.ranges

    @property
    def local(self) -> Tensor:
        return to_local_if_dtensor(self.tensor).detach()

    def take(self, box: Box) -> Tensor:
        """A view of a box of the whole tensor. This rank must hold the box, in one piece."""
        for place, own in boxes_of(self.ranges):
            if box == overlap(box, own):
                shift = [p[0] - o[0] for p, o in zip(place, own, strict=True)]
                return self.local[tuple(slice(a + s, b + s) for (a, b), s in zip(box, shift, strict=True))]
        raise AssertionError((self.names, box))


Described = tuple[tuple[str, ...], tuple[int, ...], torch.dtype, tuple[Ranges, ...]]


def stored_parts(model: nn.Module | Pipeline) -> list[StoredPart]:
    """This rank's parts of a model, with or without a plan."""
    if isinstance(model, Pipeline):
        model.check_finished()
    elif not was_touched(model):
        return [StoredPart(model, inner_model(model), {})]
    return [part_of(part, model) for part in parts_of(model)]


def own_of(model: nn.Module | Pipeline | None) -> list[Own]:
    """This rank's tensors of a model, with or without a plan; empty where the rank has no part of it.

    Raises:
        ValueError: one is on the meta device; the model has adapters.
    """
    parts = [] if model is None else stored_parts(model)
    found = [Own(e.names, e.tensor, ranges_of(e, part.packed)) for part in parts for e in part.entries]
    on_meta = next((one.names[0] for one in found if one.tensor.is_meta), None)
    if on_meta is not None:
        raise ValueError(f"{on_meta} is on the meta device: it has no values. Write materialize(model, device) before")
    return found


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """A tensor of a model that is spread over ranks.

    Args:
        holders: ranges -> the ranks that hold them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: dict[tuple[Ranges, ...], list[int]] = field(default_factory=dict)

    def sources(self, box: Box, receiver: int, turn: int) -> tuple[tuple[int, Box], ...]:
        """Which rank gives which part of a box: the receiver itself if it has that part, else the ranks that have it take turns."""
        left, found = [box], []
        for ranges, ranks in sorted(self.holders.items(), key=lambda one: receiver not in one[1]):
            source = receiver if receiver in ranks else ranks[turn % len(ranks)]
            for own in product(*ranges):
                rest: list[Box] = []
                for one in left:
                    both = overlap(one, own)
                    if both is None:
                        rest.append(one)
                    else:
                        found.append((source, both))
                        rest += without(one, both)
                left = rest
            if not left:
                break
        assert not left, (self.names, box, self.holders)
        return tuple(found)


def merged(ranks: Sequence[Sequence[Described]]) -> list[WholeTensor]:
    """The tensors of the whole model, from the descriptions of each rank.

    Raises:
        ValueError: a tensor has another shape or dtype on another rank.
    """
    found: dict[str, WholeTensor] = {}
    for rank, rows in enumerate(ranks):
        for names, shape, dtype, ranges in rows:
            one = next((found[name] for name in names if name in found), WholeTensor(names, shape, dtype))
            if (one.shape, one.dtype) != (shape, dtype):
                raise ValueError(
                    f"{names[0]} is {shape} in {dtype} on rank {rank}, and {one.shape} in {one.dtype} on others: "
                    "build the same model on all ranks"
                )
            one.holders.setdefault(ranges, []).append(rank)
            found |= dict.fromkeys((*names, *one.names), one)
    return list(dict.fromkeys(found.values()))


def numbers_of(wholes: Sequence[WholeTensor]) -> dict[str, int]:
    """Name of a tensor -> its number. Every name of a tensor is there."""
    return {name: key for key, one in enumerate(wholes) for name in one.names}


def overlap(one: Box, other: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def without(box: Box, cut: Box) -> Iterator[Box]:
    """The rest of a box without a box inside it."""
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, cut, strict=True)):
        for side in ((start, first), (last, stop)):
            if side[0] < side[1]:
                yield (*cut[:dim], side, *box[dim + 1 :])


# Boxes that are sent


@dataclass(frozen=True)
class Want:
    """A box of a whole tensor, by the tensor's number, and the dtype of its destination."""

    key: int
    box: Box
    dtype: torch.dtype


@dataclass(eq=False)
class Arrived:
    """Tensors that other ranks hold: a read into a meta tensor records the box that is wanted; once it arrived, a read finds it."""

    noted: dict[Want, None] = field(default_factory=dict)
    boxes: dict[Want, Tensor] = field(default_factory=dict)

    def wanted(self, act: Callable[[], object]) -> tuple[Want, ...]:
        self.noted = {}
        act()
        return tuple(self.noted)


@dataclass(frozen=True, eq=False)
class Elsewhere(Expression):
    """A tensor that other ranks hold."""

    key: int
    arrived: Arrived
    parts: tuple[Expression, ...] = ()

    def read(self, out: Tensor, box: Box) -> None:
        want = Want(self.key, box, out.dtype)
        if out.is_meta:
            self.arrived.noted[want] = None
        else:
            out.copy_(self.arrived.boxes[want])


def under_own_names(wholes: Sequence[WholeTensor], arrived: Arrived) -> dict[str, Lazy]:
    """Each tensor under each of its names in its model."""
    found: dict[str, Lazy] = {}
    for key, one in enumerate(wholes):
        found |= dict.fromkeys(one.names, _elsewhere(one, key, arrived))
    return found


def under_checkpoint_names(
    wholes: Sequence[WholeTensor], arrived: Arrived, model: nn.Module, *, tied: bool
) -> dict[str, Lazy]:
    """The tensors as a checkpoint of the model has them.

    Args:
        model: without wrappers.
        tied: whether a tied tensor has an entry for each of its names; else it has one, as in a checkpoint.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    found: dict[str, Lazy] = {}
    for key, one in enumerate(wholes):
        if not any(name in ignored for name in one.names):
            names = one.names if tied else [kept_name(one.names, model)]
            found |= dict.fromkeys(names, _elsewhere(one, key, arrived))
    return saved_names(model, found)


def _elsewhere(one: WholeTensor, key: int, arrived: Arrived) -> Lazy:
    return lazy(torch.empty(one.shape, dtype=one.dtype, device="meta"), Elsewhere(key, arrived))
