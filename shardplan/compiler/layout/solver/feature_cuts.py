"""Finding where the model's code cuts the result of a matrix into parts."""

from __future__ import annotations

import torch
from torch import Tensor

from .flow import Flow, Product

UNKNOWN = -1  # for a feature


def cut(flow: Flow, made: Product) -> tuple[int, ...]:
    """The lengths of the parts into which a result is cut along its last dim, the features; empty where it is not cut.

    Before, the code may change the whole result: clamp it, give its features more dims, move these to the front
    (`qkv.reshape(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)[0]`). Parts are recognised by their numbers, so all ways of cutting
    are the same: chunk, split, unbind, indices. Or the code cuts the matrix, and multiplies by each part (nn.MultiheadAttention).
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
        features: the feature of each number in the value.
        width: the number of features.
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
    """The feature of each number in a value with the same number of elements as another; None where this is unknown."""
    moved = _found(whole, features, value)
    if moved is not None:
        return moved
    return features if value.shape == whole.shape else None  # an element-wise function


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


def _place(features: Tensor | None, width: int) -> tuple[int, int] | None:
    """The first feature of a part, and the feature after its last; None where the part has all features, or they are not
    adjacent."""
    found = None if features is None else features[features != UNKNOWN].unique()
    if found is None or not found.numel():
        return None
    first, last = int(found[0]), int(found[-1])
    together = last - first + 1 == found.numel() < width
    return (first, last + 1) if together else None


def _lengths(places: set[tuple[int, int]], width: int) -> tuple[int, ...]:
    """The lengths of adjacent parts; empty where they are not the whole."""
    ends: dict[int, int] = {}
    for first, end in places:
        ends[first] = max(end, ends.get(first, 0))
    lengths, at = [], 0
    while at in ends:
        lengths.append(ends[at] - at)
        at = ends[at]
    return tuple(lengths) if at == width and len(lengths) > 1 else ()
