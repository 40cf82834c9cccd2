"""Runs in which code chooses otherwise: masks and indices of split values are others, alike in the unsharded run and on every rank.

Code may ask a rank's slice whether any of its tokens is chosen, or how many are. On the batches of a proof all ranks may hear the same; so
masks and indices are replaced, each rank's by its part of the unsharded run's, in such ways that ranks hear different answers. What chooses for each
token by itself is right then too, also where it skips what nobody needs.

A rank may also count the places of its slice from 0 (`torch.arange(x.shape[1])`), or cut a table to its length. What comes of it may be the same
for all places of a short sequence (`places < 4096`); so places that a rank does not have are far away in another unsharded run, or those that code
compares them with (`places == 61`).

A mask that all ranks have whole may be alike everywhere (`distance < 4096`). What it chooses, of one head alone, then makes no difference; so where
it may choose for a part of the heads, every second entry of it is the other one in one more run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from shardplan.core.search_bounds import BOUNDS
from shardplan.model.reduced.trace import Event, Place, SourceLine, Trace

from .spread import WHOLE, Spread
from .spreads import Spreads
from .types import rows_order

# Operations that return as many elements as a mask or the values of indices say.
LENGTHS = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive repeat_interleave bincount one_hot where".split()
)
WAYS = 3
CUTS = frozenset(("__getitem__", "narrow"))
SUMMED = "cumsum"
FAR = 720720  # it leaves the remainders by small numbers as they are
Way = Callable[[Tensor, int, Sequence[Tensor]], Tensor | None]  # of whole values along a dim, and the rows of each rank


@dataclass(frozen=True)
class Choice:
    """Masks or indices that one line of code makes, and what reads them of a whole slice.

    Args:
        teller: the operation of the first rank that joins what its slice chose, or selects by it.
        operand: the operand of it that was chosen.
        ways: other values: for the unsharded run and for each rank, place -> value.
    """

    teller: Event
    operand: int
    ways: Sequence[Sequence[Mapping[Place, Tensor]]]


@dataclass(frozen=True)
class _Chosen:
    """A result of an operation of the first rank, or what moves to a module: a mask or indices, of which each rank has a part."""

    event: Event
    index: int
    spread: Spread

    @property
    def number(self) -> int:
        return self.event.outputs[self.index]


def other_choices(spreads: Spreads) -> Iterator[Choice]:
    """The choices of a run that is right, each with other ones."""
    lines: dict[SourceLine | None, dict[tuple[str, int], _Chosen]] = {}
    made: set[int] = set()  # booleans and integers that are split
    for event in spreads.runs[0].events:
        found = _chosen(spreads, event, made)
        if found is not None:
            # One a call: after another choice, code may run other operations, and places would be others.
            lines.setdefault(event.source, {}).setdefault(event.place[:2], found)
    for calls in lines.values():
        chosen = {one.number for one in calls.values()}
        told = _teller(spreads, chosen)
        if told is not None:
            numbers = _compared(spreads.runs[0], chosen)
            ways = (*(partial(_other, way=way) for way in range(WAYS)), *(partial(_alone, to=to) for to in numbers))
            planted = (_planted(spreads, [*calls.values()], way) for way in ways)
            yield Choice(*told, [one for one in planted if one[0]])
    yield from _counted_anew(spreads)


def _counted_anew(spreads: Spreads) -> Iterator[Choice]:
    """Places that each rank counts from 0, also among tokens of a kind, or a table that each cuts to its length: those of the unsharded run that no
    rank has in their place are far away."""
    run = spreads.runs[0]
    lines: dict[SourceLine | None, list[tuple[Event, int, Place, Tensor]]] = {}
    known: set[int] = set()
    for event in run.events:
        inherited = not known.isdisjoint(event.inputs)
        for index, output in enumerate(event.outputs if event.kind == "op" and not event.writes else ()):
            place = spreads.place(event)
            if inherited or place is None or output in event.inputs or run.requires_grad[output]:
                known |= {output} if inherited else set()
            elif (apart := _counted_apart(spreads, event, place, index)) is not None:
                lines.setdefault(event.source, []).append((event, index, place, apart))
                known.add(output)
    for calls in lines.values():
        event, index, *_ = calls[0]
        numbers = set[int]().union(*(_compared_as_it_is(run, event.outputs[index]) for event, index, *_ in calls))
        to = (
            partial(_moved, by=FAR),
            partial(_moved, by=-FAR),
            *(partial(_filled, number=number) for number in sorted(numbers)),
        )
        ways = [
            {place: _elsewhere(spreads, place, index, apart, one) for _, index, place, apart in calls} for one in to
        ]
        yield Choice(event, event.outputs[index], [[far, *({} for _ in spreads.runs)] for far in ways])


def other_constants(spreads: Spreads) -> Iterator[tuple[SourceLine | None, Sequence[Mapping[Place, Tensor]]]]:
    """Computed masks that every rank has whole, that are alike everywhere, and that may choose for a part of a split value: the line, and, for
    the unsharded run and for each rank, place -> the mask with every second entry changed."""
    run, known = spreads.runs[0], set[int]()
    lines: dict[SourceLine | None, dict[tuple[str, int], tuple[Place, Event, int]]] = {}
    for event in run.events:
        if not known.isdisjoint(event.inputs):
            known.update(event.outputs)
        elif event.kind == "op" and event.inputs and not event.writes:
            for index, output in enumerate(event.outputs):
                is_mask = output not in event.inputs and _is_constant(run.values[output])
                if is_mask and _is_whole(spreads.of(event, index)) and (place := spreads.place(event)) is not None:
                    known.add(output)
                    lines.setdefault(event.source, {}).setdefault(event.place[:2], (place, event, index))
    for line, calls in lines.items():
        if _for_a_part(spreads, {event.outputs[index] for _, event, index in calls.values()}):
            masks = [(place, at.place, _every_second(run.values[at.outputs[i]])) for place, at, i in calls.values()]
            own = {place: mask for _, place, mask in masks}
            yield line, [{place: mask for place, _, mask in masks}, *(own for _ in spreads.runs)]


def _for_a_part(spreads: Spreads, made: set[int]) -> bool:
    """Whether whole masks, and what is made of them and of other whole values alone, may choose for a part of a split value: they are written, or
    joined with its slices, or meet what a rank has by itself. A mask that is broadcast over a split value with a gradient is the same for each
    slice."""
    run = spreads.runs[0]
    for event in run.events:
        others = [i for i, number in enumerate(event.inputs) if number not in made]
        if event.kind != "op" or len(others) == len(event.inputs):
            continue
        if event.writes:
            return True
        if all(_is_whole(spreads.of(event, i)) for i in range(len(event.outputs))):
            made.update(output for output in event.outputs if not run.requires_grad[output])
        elif not _is_broadcast(run, event) or not all(_has_its_share(spreads, event, i) for i in others):
            return True
    return False


def _is_broadcast(run: Trace, event: Event) -> bool:
    """Whether the operands' shapes are broadcast to the result's."""
    sizes = zip_longest(*(reversed(run.values[number].shape) for number in event.inputs), fillvalue=1)
    return [{1, *one} for one in sizes] == [{1, size} for size in reversed(run.values[event.outputs[0]].shape)]


def _has_its_share(spreads: Spreads, event: Event, operand: int) -> bool:
    spread = spreads.of(event, operand, inputs=True)
    differentiable = spreads.runs[0].requires_grad[event.inputs[operand]]
    return _is_whole(spread) or (isinstance(spread, Spread) and differentiable)


def _is_whole(spread: Spread | str | None) -> bool:
    return isinstance(spread, Spread) and spread.kind == "whole"


def _is_constant(mask: Tensor) -> bool:
    return mask.dtype == torch.bool and mask.numel() > 1 and bool(mask.all() or not mask.any())


def _every_second(mask: Tensor) -> Tensor:
    """A mask with other entries where the indices add up to an odd number: those of equal indices stay."""
    return mask ^ (sum(torch.meshgrid(*map(torch.arange, mask.shape), indexing="ij")) % 2 == 1)


def _counted_apart(spreads: Spreads, event: Event, place: Place, index: int) -> Tensor | None:
    """Which entries of the unsharded run's result no rank has in their place, where the ranks' results are no slices of it but by chance; None
    for other results."""
    spread, before = spreads.of(event, index), [spreads.of(event, i, inputs=True) for i in range(len(event.inputs))]
    if spread == "?" or (spread is not None and (event.name not in CUTS or any(one != WHOLE for one in before))):
        return None
    own = [run.values[run.at[event.place].outputs[index]] for run in spreads.runs]
    whole = _whole(spreads, place, index)
    dims = {
        dim for one in own for dim in range(whole.ndim) if one.ndim == whole.ndim and one.shape[dim] != whole.shape[dim]
    }
    if len(dims) != 1:
        return None
    dim = dims.pop()
    apart = torch.ones_like(whole, dtype=torch.bool)
    if event.name == SUMMED and isinstance(before[0], Spread) and before[0].kind == "split" and before[0].dim == dim:
        order = before[0].order or rows_order(1, whole.shape[dim], len(own))
        for one, part in zip(own, map(torch.tensor, order), strict=True):
            apart.index_copy_(dim, part, whole.index_select(dim, part) != one)
        return apart
    length = max(one.shape[dim] for one in own)
    begin = (one.ndim == whole.ndim and torch.equal(one, whole.narrow(dim, 0, one.shape[dim])) for one in own)
    if length >= whole.shape[dim] or not all(begin):
        return None
    apart.narrow(dim, 0, length).fill_(False)
    return apart


def _whole(spreads: Spreads, place: Place, index: int) -> Tensor:
    """A result of the unsharded run."""
    return spreads.reference.values[spreads.reference.at[place].outputs[index]]


def _elsewhere(spreads: Spreads, place: Place, index: int, apart: Tensor, to: Callable[[Tensor], Tensor]) -> Tensor:
    whole = _whole(spreads, place, index)
    return torch.where(apart, to(whole), whole)


def _moved(whole: Tensor, by: int) -> Tensor:
    return ~whole if whole.dtype == torch.bool else whole + by


def _filled(whole: Tensor, number: int) -> Tensor:
    return torch.tensor(number).to(whole.dtype).expand_as(whole)


def _chosen(spreads: Spreads, event: Event, made: set[int]) -> _Chosen | None:
    """The first result of an operation, or of a move to a module, that is a mask, or integers that are not computed from others, where it is
    split."""
    if event.kind not in ("op", "enter") or event.writes:
        return None
    values, found = spreads.runs[0].values, None
    before = {values[i].dtype for i in event.inputs if i in made}
    for index, output in enumerate(event.outputs):
        value = values[output]
        if value.is_floating_point() or value.is_complex() or output in event.inputs:
            continue
        spread = spreads.of(event, index)
        if not isinstance(spread, Spread) or spread.kind != "split" or spread.copies > 1 or spread.joined:
            continue
        made.add(output)
        first = value.dtype not in before if value.dtype == torch.bool else not before
        if first and found is None:
            found = _Chosen(event, index, _ordered(spreads, event, index, spread))
    return found


def _ordered(spreads: Spreads, event: Event, index: int, spread: Spread) -> Spread:
    """A split result in the order of rows that the operand has from which it is made, row by row: a mask of few rows fits several orders."""
    values = spreads.runs[0].values
    shape = values[event.outputs[index]].shape
    for i, number in enumerate(event.inputs if spread.order is None else ()):
        of = spreads.of(event, i, inputs=True)
        if isinstance(of, Spread) and of.order is not None and of.dim == spread.dim and values[number].shape == shape:
            return replace(spread, order=of.order)
    return spread


def _teller(spreads: Spreads, chosen: set[int]) -> tuple[Event, int] | None:
    """The first operation that joins what was chosen over a rank's slice, or whose length it is; or the one that made a value of which code
    reads every element."""
    run = spreads.runs[0]
    asked = set(run.answers)
    for event in run.events:
        operands = [i for i in event.inputs if i in chosen]
        if event.kind != "op" or not operands:
            continue
        masks = (i for i in operands if run.values[i].dtype == torch.bool)
        if event.name in LENGTHS or (event.name == "__getitem__" and any(masks)):
            if event.name != "where" or len(event.inputs) == 1:
                return event, operands[0]
        for index, output in enumerate(event.outputs):
            if run.requires_grad[output] or output in event.inputs:
                continue
            chosen.add(output)
            spread = spreads.of(event, index)
            if not isinstance(spread, Spread) or spread.kind != "split":
                return event, operands[0]
    told = next((i for i in chosen if i in asked), None)
    return None if told is None else (run.producers[told], told)


def _compared(run: Trace, chosen: Iterable[int]) -> Iterator[tuple[int, bool]]:
    """Numbers that a rank's indices may be, on both sides of those with which code compares them, or integers that come from them; each with
    whether the others are the largest index of the batch, or the least."""
    found, known = set(chosen), set[int]()
    for event in run.events:
        if event.kind == "op" and not found.isdisjoint(event.inputs):
            found.update(i for i in event.outputs if not run.values[i].is_floating_point())
    for number in found:
        known |= run.compared.get(number, set())
    for one in sorted(known)[: BOUNDS.numbers_compared]:
        yield from ((one, True), (one, False), (one - 1, True), (one + 1, False))


def _compared_as_it_is(run: Trace, number: int) -> set[int]:
    """The whole numbers with which code compares a value or views of it."""
    found, values = {number}, run.values[number].flatten()
    for event in run.events:
        if event.kind == "op" and not found.isdisjoint(event.inputs):
            found.update(i for i in event.outputs if torch.equal(run.values[i].flatten(), values))
    return set[int]().union(*(run.compared.get(one, ()) for one in found))


def _planted(spreads: Spreads, chosen: Sequence[_Chosen], way: Way) -> Sequence[Mapping[Place, Tensor]]:
    ranks = len(spreads.runs)
    found: list[dict[Place, Tensor]] = [{} for _ in range(ranks + 1)]
    for one in chosen:
        place, dim = spreads.place(one.event), one.spread.dim
        assert place is not None and dim is not None, one
        whole = _whole(spreads, place, one.index)
        parts = one.spread.order or rows_order(1, whole.shape[dim], ranks)
        rows = [torch.tensor(part, dtype=torch.long) for part in parts]
        other = way(whole, dim, rows) if all(map(len, rows)) else None
        if other is not None:
            found[0][place] = other
            for own, part in zip(found[1:], rows, strict=True):
                own[one.event.place] = other.index_select(dim, part)
    return found


def _other(whole: Tensor, dim: int, rows: Sequence[Tensor], way: int) -> Tensor | None:
    """Other choices along a dim, where each rank has its rows; None where all choose alike.

    | way | masks | indices |
    |---|---|---|
    | 0 | the first row of each rank, and all of the last one's | the first rank's as the first token's, the last one's as those of another |
    | 1 | all of the first rank | the same, exchanged |
    | 2 | all but the last row of the last rank | all as those of the first token |

    Not all rows of a mask: where what is left is zero everywhere, a whole and a sum look alike.
    """
    if whole.dtype == torch.bool:
        filled = (torch.cat((*(part[:1] for part in rows), rows[-1])), rows[0], torch.cat([*rows])[:-1])[way]
        return torch.zeros_like(whole).index_fill_(dim, filled, True)
    one, size = int(rows[0][0]), whole.shape[dim]
    unlike = (i for i in reversed(range(size)) if not torch.equal(whole.select(dim, i), whole.select(dim, one)))
    other = next(unlike, None)
    if other is None:
        return None
    if way == 2:
        return whole[(*(slice(1) for _ in range(dim)), slice(one, one + 1))].expand_as(whole).clone()
    first, last = (one, other) if way == 0 else (other, one)
    return whole.index_select(dim, torch.arange(size).index_fill(0, rows[0], first).index_fill(0, rows[-1], last))


def _alone(whole: Tensor, dim: int, rows: Sequence[Tensor], to: tuple[int, bool]) -> Tensor | None:
    """Other indices, where the first rank's are one number (see `_compared`); None for masks, and where they cannot be, or all would."""
    number, is_largest = to
    if whole.dtype == torch.bool or not whole.numel():
        return None
    limits, rest = torch.iinfo(whole.dtype), int(whole.amax() if is_largest else whole.amin())
    if rest == number or not limits.min <= number <= limits.max:
        return None
    return torch.full_like(whole, rest).index_fill_(dim, rows[0], number)
