"""Following the features of a result through the model's code, to find the parts into which they are cut, and the heads of each part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from shardplan.model.reduced.trace import Event

from .flow import MATMULS, Flow, Product

POSITION_OF_CHANNELS = 1  # in [batch, channels, positions], the layout of convolutions
UNKNOWN = -1  # for a feature
Place = tuple[int, int]  # the first feature of a part, and the feature after its last


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent features that the code takes out of a result together.

    Args:
        length: their number.
        heads: the number of heads into which the code splits them; None where it does not.
    """

    length: int
    heads: int | None = None


def parts_of(flow: Flow, number: int, dim: int) -> tuple[Part, ...]:
    """The parts of the features in one dim of a value, in order; one part where they are not cut. Parts of parts count, those of heads do
    not. The groups of a norm are not heads."""
    features = _along(flow.run.values[number], dim)
    places, heads = _followed(flow, number, features, inside=False)
    ends = sorted({0, *features.shape[dim : dim + 1], *chain.from_iterable(places)})
    known = [Part(end - start, heads.get((start, end))) for start, end in pairwise(ends)]
    return tuple(Part(one.length, one.heads or _like_others(known, one.length)) for one in known)


def cut(flow: Flow, made: Product) -> tuple[int, ...]:
    """The lengths of the parts into which a result is cut along its last dim, the features; empty where it is not cut.

    Before, the code may give its features more dims, and move these to the front (`qkv.reshape(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)[0]`).
    Or the code cuts the matrix, and multiplies by each part (nn.MultiheadAttention).
    """
    value = flow.run.values[made.outputs[0]]
    lengths = _lengths(flow, made.outputs[0], value.ndim - 1) if value.ndim else ()
    matrix = next((number for number, name in flow.run.parameters.items() if name == made.name), None)
    if lengths or matrix is None or flow.run.values[matrix].ndim != 2:
        return lengths
    return _lengths(flow, matrix, 1 if made.turned else 0)


def _lengths(flow: Flow, number: int, dim: int) -> tuple[int, ...]:
    """The lengths of adjacent parts of the features in one dim of a value; empty where they are not the whole."""
    features = _along(flow.run.values[number], dim)
    ends, lengths, at, width = dict[int, int](), list[int](), 0, features.shape[dim]
    for first, end in _followed(flow, number, features, inside=True)[0] - {(0, width)}:
        ends[first] = max(end, ends.get(first, 0))
    while at in ends:
        lengths.append(ends[at] - at)
        at = ends[at]
    return tuple(lengths) if at == width and len(lengths) > 1 else ()


def _along(value: Tensor, dim: int) -> Tensor:
    """The feature of each number in a value with its features in one dim."""
    return torch.arange(value.shape[dim]).view(-1, *(1,) * (value.ndim - dim - 1)).expand(value.shape)


def _followed(flow: Flow, start: int, features: Tensor, *, inside: bool) -> tuple[set[Place], dict[Place, int]]:
    """The parts of a value's features that the code takes out together, and the heads of parts.

    Args:
        features: the feature of each number in the value.
        inside: follow heads, but no parts.
    """
    maps, places, heads = {start: features}, set[Place](), dict[Place, int]()
    for number in (queue := [start]):
        own = maps[number]
        for event, output in ((e, o) for e in flow.readers.get(number, ()) for o in e.outputs if o not in maps):
            count = _heads(flow, number, own, output) if flow.tree.modules[event.module].kind != "norm" else None
            place = _place(own)
            if count is not None and place is not None:
                heads.setdefault(place, count)
            found = _carried(flow, event, number, own, output) if count is None or inside else None
            place = _place(found) if found is not None else None
            if found is not None and place is not None and (inside or _dim(found) is not None):
                places.add(place)
                alone = sum(flow.run.requires_grad[n] for n in event.inputs) == 1
                if not inside or (alone and found.numel() == features.numel()):
                    maps[output] = found
                    queue.append(output)
    return places, heads


def _like_others(parts: list[Part], length: int) -> int | None:
    """The heads of a part, from another part: one of the same length (factors of an element-wise product have the same
    heads), or one whose number of heads is this part's number of features."""
    same = max((one.heads for one in parts if one.length == length and one.heads), default=None)
    return same or (length if any(one.heads == length for one in parts) else None)


def _dim(features: Tensor) -> int | None:
    """The dim along which alone features differ, as far as they are known."""
    for dim in range(features.ndim):
        if features.shape[dim] == features[features != UNKNOWN].unique().numel():
            alike = (
                features.amax([d for d in range(features.ndim) if d != dim], keepdim=True)
                if features.ndim > 1
                else features
            )
            if bool(((features == alike) | (features == UNKNOWN)).all()):
                return dim
    return None


def _heads(flow: Flow, number: int, features: Tensor, output: int) -> int | None:
    """The number of heads where a result is a value with the features' dim split into two or more; None where it is not, or where each
    feature would be a head. The dims before it may be joined."""
    whole, result, of = flow.run.values[number], flow.run.values[output], _dim(features)
    if of is None or result.numel() != whole.numel():
        return None
    before, after = whole.shape[:of].numel(), whole.shape[of + 1 :]
    first = next((dim for dim in range(result.ndim) if result.shape[:dim].numel() == before), None)
    end = result.ndim - len(after)
    if (
        first is None
        or end - first < 2
        or result.shape[end:] != after
        or result.shape[first:end].numel() != whole.shape[of]
        or result.shape[first] == whole.shape[of]
    ):
        return None
    return result.shape[first] if torch.equal(result.reshape(whole.shape), whole) else None


def _carried(flow: Flow, event: Event, number: int, features: Tensor, output: int) -> Tensor | None:
    """The feature of each number in a result of an operation; None where it mixes features.

    Whatever moves numbers is recognised by them: chunk, split, unbind, indices, permutations. Element-wise operations and depthwise
    convolutions leave features where they are; other dims may be cut, padded or broadcast.
    """
    whole, result, of = flow.run.values[number], flow.run.values[output], _dim(features)
    if not result.is_floating_point() or not result.numel():
        return None
    if event.name in MATMULS and (flow.depthwise(event) is None or of != POSITION_OF_CHANNELS):
        return None
    if event.name not in MATMULS and (moved := _found(whole, features, result)) is not None:
        return moved
    if result.shape == whole.shape:
        return features
    if of is None or result.ndim != whole.ndim or result.shape[of] != whole.shape[of]:
        return None
    return features.movedim(of, 0).flatten(1).amax(1).view(-1, *(1,) * (result.ndim - of - 1)).expand(result.shape)


def _found(whole: Tensor, features: Tensor, part: Tensor) -> Tensor | None:
    """The feature of each number in a part of a value, UNKNOWN where several features have this number; None where the
    part has other numbers."""
    numbers, group = whole.flatten().unique(return_inverse=True)
    at = torch.searchsorted(numbers, part.flatten()).clamp(max=numbers.numel() - 1)
    if not torch.equal(numbers[at], part.flatten()):
        return None
    least, most = (
        features.new_zeros(numbers.numel()).scatter_reduce(0, group, features.flatten(), how, include_self=False)
        for how in ("amin", "amax")
    )
    return torch.where(least == most, least, UNKNOWN)[at].view(part.shape)


def _place(features: Tensor) -> Place | None:
    """The first of adjacent features, and the feature after the last; None where they are not adjacent."""
    found = features[features != UNKNOWN].unique()
    first, last = (int(found[0]), int(found[-1])) if found.numel() else (0, -2)
    return (first, last + 1) if last - first + 1 == found.numel() else None
