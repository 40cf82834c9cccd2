"""Which rank sends which slices where, in rounds of bounded size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .lazy import Box
from .whole_tensors import Arrived, Want, WholeTensor

# Boxes that are read together: for each its dtype when sent, and which rank gives which part of it.
Unit = tuple[tuple[Want, torch.dtype, tuple[tuple[int, Box], ...]], ...]


def unit_of(wants: Sequence[Want], wholes: Sequence[WholeTensor], receiver: int, turn: int) -> Unit:
    return tuple(
        (want, narrower(wholes[want.key].dtype, want.dtype), wholes[want.key].sources(want.box, receiver, turn + i))
        for i, want in enumerate(wants)
    )


def narrower(given: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The dtype in which values are sent: the receiver's if it is no larger; then the sender casts."""
    return wanted if wanted.itemsize <= given.itemsize else given


def elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def amounts(unit: Unit, receiver: int) -> Counter[int]:
    """Source -> bytes that it sends for a unit."""
    found: Counter[int] = Counter()
    for _, dtype, parts in unit:
        for source, box in parts:
            if source != receiver:
                found[source] += elements(box) * dtype.itemsize
    return found


def sent_by_pairs(asked: Mapping[int, Sequence[Unit]]) -> dict[tuple[int, int], int]:
    """(source, destination) -> bytes, from the requests of each destination."""
    sent: Counter[tuple[int, int]] = Counter()
    for receiver, units in asked.items():
        for unit in units:
            sent.update({(source, receiver): size for source, size in amounts(unit, receiver).items()})
    return dict(sent)


def busiest(sent: Mapping[tuple[int, int], int]) -> int:
    """The most bytes that one rank sends or receives."""
    ways: Counter[tuple[str, int]] = Counter()
    for (source, destination), size in sent.items():
        ways["sends", source] += size
        ways["receives", destination] += size
    return max(ways.values(), default=0)


@dataclass
class Round:
    """The work of one rank in one round.

    Args:
        moves: whether any rank sends.
        sends: destination -> boxes that this rank holds, and their dtypes when sent.
        receives: source -> parts of boxes.
        own: parts of boxes that this rank holds itself.
        units: the numbers of this rank's units that are complete after it.
        dtypes: the boxes' dtypes when sent.
    """

    moves: bool
    sends: dict[int, list[tuple[int, Box, torch.dtype]]] = field(default_factory=dict)
    receives: dict[int, list[tuple[Want, Box]]] = field(default_factory=dict)
    own: list[tuple[Want, Box]] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    dtypes: dict[Want, torch.dtype] = field(default_factory=dict)


def rounds_of(asked: Mapping[int, Sequence[Unit]], rank: int, limit: int) -> list[Round]:
    """A rank's part of the rounds in which all ranks receive what they asked for. In a round no rank sends or receives more than the
    limit, except for a single unit that is larger.

    Args:
        asked: receiver -> its units.
        limit: bytes.
    """
    loads: list[tuple[Counter[int], Counter[int]]] = []
    made: list[Round] = []
    begin: Counter[int] = Counter()
    for i in range(max(map(len, asked.values()), default=0)):
        for receiver, units in asked.items():
            if i < len(units):
                sent, k = amounts(units[i], receiver), begin[receiver]
                while k < len(loads) and not _fits(loads[k], sent, receiver, limit):
                    k += 1
                if k == len(loads):
                    loads.append((Counter(), Counter()))
                    made.append(Round(moves=False))
                loads[k][0].update(sent)
                loads[k][1][receiver] += sent.total()
                made[k].moves |= bool(sent)
                begin[receiver] = k
                _note(made[k], i, units[i], receiver, rank)
    return made


def _fits(load: tuple[Counter[int], Counter[int]], sent: Counter[int], receiver: int, limit: int) -> bool:
    def room(now: int, more: int) -> bool:
        return not now or now + more <= limit

    return room(load[1][receiver], sent.total()) and all(room(load[0][rank], more) for rank, more in sent.items())


def _note(made: Round, number: int, unit: Unit, receiver: int, rank: int) -> None:
    for want, dtype, parts in unit:
        if receiver == rank:
            made.dtypes[want] = dtype
        for source, box in parts:
            if receiver == rank:
                (made.own if source == rank else made.receives.setdefault(source, [])).append((want, box))
            elif source == rank:
                made.sends.setdefault(receiver, []).append((want.key, box, dtype))
    if receiver == rank:
        made.units.append(number)


def exchange(
    one: Round,
    take: Callable[[int, Box], Tensor],
    arrived: Arrived,
    place: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send and receive. A collective of all ranks of the group, if any rank sends.

    Args:
        take: gives a box of a tensor that this rank holds, by the tensor's number.
        arrived: gets the boxes.
        place: the device for tensors that are sent.
    """
    pieces: list[tuple[Want, Box, Tensor]] = [(want, box, take(want.key, box)) for want, box in one.own]
    if one.moves:
        ranks = range(dist.get_world_size(group))
        empty = torch.empty(0, dtype=torch.uint8, device=place)
        parts = [
            [take(key, box).to(place, dtype).reshape(-1).view(torch.uint8) for key, box, dtype in one.sends.get(to, ())]
            for to in ranks
        ]
        outgoing = torch.cat([empty, *(x for part in parts for x in part)])
        sizes = [sum(elements(b) * one.dtypes[w].itemsize for w, b in one.receives.get(source, ())) for source in ranks]
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
        dist.all_to_all_single(incoming, outgoing, sizes, [sum(x.numel() for x in part) for part in parts], group)
        position = 0
        for source in ranks:
            for want, box in one.receives.get(source, ()):
                stop = position + elements(box) * one.dtypes[want].itemsize
                # Copies are aligned for every dtype.
                values = incoming[position:stop].clone().view(one.dtypes[want])
                pieces.append((want, box, values.view([b - a for a, b in box])))
                position = stop
    for want, box, values in pieces:
        if box == want.box:
            arrived.boxes[want] = values
            continue
        if want not in arrived.boxes:
            shape = [stop - start for start, stop in want.box]
            arrived.boxes[want] = torch.empty(shape, dtype=one.dtypes[want], device=place)
        index = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, want.box, strict=True))
        arrived.boxes[want][index] = values
