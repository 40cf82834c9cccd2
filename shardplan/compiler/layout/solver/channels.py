"""Following the features of a result through the model's code, to find the parts into which they are cut, and the heads of each part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations

import torch

from shardplan.core.search_bounds import BOUNDS
from shardplan.model.reduced.trace import Event

from .flow import MATMULS, Flow

POSITION_OF_CHANNELS = 1  # in [batch, channels, positions], the layout of convolutions


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent features that the code takes out of a result together.

    Args:
        length: their number.
        heads: the number of heads into which the code splits them; None where it does not.
    """

    length: int
    heads: int | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Features of the result, from `start` on, that are in one dim of a value."""

    number: int
    dim: int
    start: int
    length: int


def parts_of(flow: Flow, number: int, dim: int) -> tuple[Part, ...]:
    """The parts of the features in one dim of a value, in order; one part where they are not cut.

    It follows operations that do not mix features: element-wise operations, cuts, permutations, depthwise convolutions.
    The groups of a norm are not heads.
    """
    size = flow.run.values[number].shape[dim]
    ends, heads = {0, size}, dict[tuple[int, int], int]()
    queue = [_Span(number, dim, 0, size)]
    seen = {(number, dim)}
    for span in queue:
        ends.update((span.start, span.start + span.length))
        for event in flow.readers.get(span.number, ()):
            for output in event.outputs:
                count = _heads(flow, span, output) if flow.tree.modules[event.module].kind != "norm" else None
                if count is not None:
                    heads.setdefault((span.start, span.length), count)
                    continue
                for more in _carried(flow, span, event, output):
                    if (more.number, more.dim) not in seen:
                        seen.add((more.number, more.dim))
                        queue.append(more)
    places = sorted(ends)
    found = [(start, end - start) for start, end in pairwise(places)]
    known = [Part(length, heads.get((start, length))) for start, length in found]
    return tuple(Part(one.length, one.heads or _like_others(known, one.length)) for one in known)


def _like_others(parts: list[Part], length: int) -> int | None:
    """The heads of a part, from another part: one of the same length (factors of an element-wise product have the same
    heads), or one whose number of heads is this part's number of features."""
    same = max((one.heads for one in parts if one.length == length and one.heads), default=None)
    return same or (length if any(one.heads == length for one in parts) else None)


def _heads(flow: Flow, span: _Span, output: int) -> int | None:
    """The number of heads where a result is a value with the features' dim split into two or more; None where it is not.
    The dims before it may be joined."""
    whole, result = flow.run.values[span.number], flow.run.values[output]
    if result.numel() != whole.numel():
        return None
    before, after = whole.shape[: span.dim].numel(), whole.shape[span.dim + 1 :]
    first = next((dim for dim in range(result.ndim) if result.shape[:dim].numel() == before), None)
    end = result.ndim - len(after)
    if (
        first is None
        or end - first < 2
        or result.shape[end:] != after
        or result.shape[first:end].numel() != span.length
    ):
        return None
    return result.shape[first] if torch.equal(result.reshape(whole.shape), whole) else None


def _carried(flow: Flow, span: _Span, event: Event, output: int) -> Iterator[_Span]:
    """The features' spans in a result of an operation."""
    whole, result = flow.run.values[span.number], flow.run.values[output]
    if event.name in MATMULS:
        if (
            span.dim == POSITION_OF_CHANNELS
            and flow.depthwise(event) is not None
            and result.shape[POSITION_OF_CHANNELS] == span.length
        ):
            yield _Span(output, POSITION_OF_CHANNELS, span.start, span.length)
        return
    if result.ndim != whole.ndim:
        return
    same = result.shape == whole.shape
    if same and not (len(event.inputs) == 1 and not torch.equal(result, whole) and _turned(span, whole, result)):
        yield _Span(output, span.dim, span.start, span.length)
        return
    if (turned := _turned(span, whole, result)) is not None:
        yield _Span(output, turned, span.start, span.length)
    elif result.shape[span.dim] == span.length:
        yield _Span(output, span.dim, span.start, span.length)  # other dims are cut, padded or broadcast
    elif result.shape[span.dim] < span.length and _but(result, span.dim) == _but(whole, span.dim):
        length = result.shape[span.dim]
        for start in range(span.length - length + 1):
            if torch.equal(whole.narrow(span.dim, start, length), result):
                yield _Span(output, span.dim, span.start + start, length)
                return


def _but(value: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*value.shape[:dim], *value.shape[dim + 1 :])


def _turned(span: _Span, whole: torch.Tensor, result: torch.Tensor) -> int | None:
    """The features' dim in a result that is a value with permuted dims."""
    if whole.ndim > BOUNDS.dims or sorted(whole.shape) != sorted(result.shape):
        return None
    for order in permutations(range(whole.ndim)):
        if order != tuple(range(whole.ndim)) and torch.equal(whole.permute(order), result):
            return order.index(span.dim)
    return None
