"""Where the model's code cuts the result of a matrix into parts."""

from __future__ import annotations

import torch
from torch import Tensor

from .flow import Flow, Product

UNKNOWN = -1  # for a feature


def cut(flow: Flow, made: Product) -> tuple[int, ...]:
    """The lengths of the parts that a result is cut into along its features, its last dim; empty where it is not cut.

    The code may do something with all of it before: clamp it, give its features more dims, move these to the front
    (`qkv.reshape(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)[0]`). Parts are told by their numbers, so that all ways of cutting
    are one: chunk, split, unbind, indices. Or it cuts the matrix, and multiplies by each part (nn.MultiheadAttention).
    """
    value = flow.run.values[made.outputs[0]]
    width = value.shape[-1] if value.ndim else 0
    lengths = _cut(flow, made.outputs[0], torch.arange(width).expand(value.shape), width)
    matrix = next((number for number, name in flow.run.parameters.items() if name == made.name), None)
    if lengths or matrix is None or (value := flow.run.values[matrix]).ndim != 2:
        return lengths
    width = value.shape[1 if made.turned else 0]
    rows = torch.arange(width)
    return _cut(flow, matrix, (rows if made.turned else rows[:, None]).expand(value.shape), width)


def _cut(flow: Flow, start: int, features: Tensor, width: int) -> tuple[int, ...]:
    """As `cut`, for a value.

    Args:
        features: the feature of each number of the value.
        width: how many it has.
    """
    wholes = {start: features}
    queue, places = list(wholes), set[tuple[int, int]]()
    for number in queue:
        whole, features = flow.run.values[number], wholes[number]
        for event in flow.readers.get(number, ()):
            alone = sum(flow.run.requires_grad[n] for n in event.inputs) == 1
            for output in event.outputs:
                part = flow.run.values[output]
                if output in wholes or not part.numel() or not part.is_floating_point():
                    continue
                if part.numel() < whole.numel():
                    place = _place(_found(whole, features, part), width)
                    if place is not None:
                        places.add(place)
                elif part.numel() == whole.numel() and alone:
                    carried = _carried(whole, features, part)
                    if carried is not None:
                        wholes[output] = carried
                        queue.append(output)
    return _lengths(places, width)


def _carried(whole: Tensor, features: Tensor, value: Tensor) -> Tensor | None:
    """The feature of each number of a value that has as many as another whole; None where that cannot be told."""
    moved = _found(whole, features, value)
    if moved is not None:
        return moved
    return features if value.shape == whole.shape else None  # a function of each number by itself


def _found(whole: Tensor, features: Tensor, part: Tensor) -> Tensor | None:
    """The feature of each number of a part of a value, UNKNOWN where several features hold that number; None where it has
    others."""
    numbers, group = whole.flatten().unique(return_inverse=True)
    at = torch.searchsorted(numbers, part.flatten()).clamp(max=numbers.numel() - 1)
    if not torch.equal(numbers[at], part.flatten()):
        return None
    least, most = (
        features.new_zeros(numbers.numel()).scatter_reduce(0, group, features.flatten(), how, include_self=False)
        for how in ("amin", "amax")
    )
    return torch.where(least == most, least, UNKNOWN)[at].view(part.shape)


def _place(features: Tensor | None, width: int) -> tuple[int, int] | None:
    """The first of the features that a part consists of, and that after the last; None where it has all of them, or
    they are not adjacent."""
    found = None if features is None else features[features != UNKNOWN].unique()
    if found is None or not found.numel():
        return None
    first, last = int(found[0]), int(found[-1])
    together = last - first + 1 == found.numel() < width
    return (first, last + 1) if together else None


def _lengths(places: set[tuple[int, int]], width: int) -> tuple[int, ...]:
    """The lengths of adjacent parts; none where they do not make up the whole."""
    ends: dict[int, int] = {}
    for first, end in places:
        ends[first] = max(end, ends.get(first, 0))
    lengths, at = [], 0
    while at in ends:
        lengths.append(ends[at] - at)
        at = ends[at]
    return tuple(lengths) if at == width and len(lengths) > 1 else ()
