"""Which rank steps which matrices, and how they are sent there and back: two collectives for each bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardplan.core.by_key import by_key

from .matrix_shards import Box, Range, Stack

Step = Callable[["Owned", Tensor], Tensor]  # matrices [n, rows, columns] in the stored order -> the results


@dataclass(frozen=True)
class Owned:
    """Matrices of one stack that one rank of its group steps together.

    Args:
        which: the index of the first one, and the index after the last.
        owner: its rank in the group.
        alone: whether the owner has all of them whole, and no other rank has a part.
    """

    stack: Stack
    which: Range
    owner: int
    alone: bool

    @property
    def work(self) -> int:
        return (self.which[1] - self.which[0]) * self.stack.work

    @property
    def numel(self) -> int:
        return (self.which[1] - self.which[0]) * self.stack.shape[1] * self.stack.shape[2]

    def part_of(self, place: int) -> Box | None:
        """The part of a rank of the group, as a box of the whole stack."""
        (first, last), rows, columns = self.stack.boxes[place]
        box = ((max(first, self.which[0]), min(last, self.which[1])), rows, columns)
        return box if all(start < end for start, end in box) else None

    def cut(self, tensor: Tensor, origin: tuple[int, int, int], place: int) -> Tensor | None:
        """A rank's part, cut from a tensor that begins at `origin` of the stack."""
        if (box := self.part_of(place)) is None:
            return None
        return tensor[tuple(slice(start - at, end - at) for (start, end), at in zip(box, origin, strict=True))]

    def own(self, local: Tensor) -> Tensor | None:
        """This rank's part of these matrices, cut from its part of the stack."""
        (a, _), (b, _), (c, _) = self.stack.box
        return self.cut(local, (a, b, c), self.stack.place)


def owned(stacks: Iterable[Stack]) -> list[Owned]:
    """All matrices, each with its owner. All ranks of a group compute the same result."""
    found: list[Owned] = []
    for members in by_key((stack.group, stack) for stack in stacks).values():
        pieces = [piece for stack in members for piece in _pieces(stack)]
        alone, shared = [one for one in pieces if one.alone], [one for one in pieces if not one.alone]
        busy = [0] * len(members[0].boxes)
        for one in alone:
            busy[one.owner] += one.work
        owners = assign([one.work for one in shared], busy)
        found += alone
        found += [Owned(one.stack, one.which, owner, False) for one, owner in zip(shared, owners, strict=True)]
    return found


def _pieces(stack: Stack) -> Iterator[Owned]:
    """A stack in pieces, cut where other ranks hold the matrices. A range that several ranks hold is cut again, one piece for each rank."""
    full = [(place, box) for place, box in enumerate(stack.boxes) if all(start < end for start, end in box)]
    borders = sorted({at for _, box in full for at in box[0]})
    for first, last in pairwise(borders):
        holders = [place for place, box in full if box[0][0] <= first and last <= box[0][1]]
        if len(holders) == 1:
            yield Owned(stack, (first, last), holders[0], True)
            continue
        size = -(-(last - first) // len(holders))
        for start in range(first, last, size):
            yield Owned(stack, (start, min(start + size, last)), 0, False)


def buckets(pieces: Iterable[Owned], most: int) -> Iterator[list[Owned]]:
    """The shared pieces in the order of exchange, in buckets with work for all ranks.

    Args:
        most: the most elements of a bucket; but it has at least one piece of each rank that has pieces left.
    """
    queues: dict[tuple[ProcessGroup, torch.dtype], dict[int, list[Owned]]] = {}
    for one in pieces:
        if not one.alone:
            assert one.stack.group is not None
            key = (one.stack.group, one.stack.parameter.dtype)
            queues.setdefault(key, {}).setdefault(one.owner, []).append(one)
    for by_owner in queues.values():
        ordered = [sorted(queue, key=lambda one: -one.work) for _, queue in sorted(by_owner.items())]
        bucket: list[Owned] = []
        for turn in range(max(map(len, ordered))):
            several = [queue[turn] for queue in ordered if turn < len(queue)]
            if bucket and sum(one.numel for one in (*bucket, *several)) > most:
                yield bucket
                bucket = []
            bucket += several
        yield bucket


def exchanged(bucket: Sequence[Owned], values: Sequence[Tensor], step: Step) -> list[Tensor | None]:
    """Step the matrices of a bucket at their owners. A collective of the group: two all-to-alls.

    Args:
        values: for each piece, this rank's part of its stack, all of one dtype, on the mesh's device.
        step: its results have the dtype of the values.

    Returns:
        For each piece, the result of this rank's part, [matrices, rows, columns]; None where it has none.
    """
    stack = bucket[0].stack
    group, me, ranks = stack.group, stack.place, len(stack.boxes)
    sent = [one.own(local) for one, local in zip(bucket, values, strict=True)]
    gathered = _all_to_all(
        [
            [x for one, x in zip(bucket, sent, strict=True) if one.owner == place and x is not None]
            for place in range(ranks)
        ],
        [sum(_volume(one.part_of(place)) for one in bucket if one.owner == me) for place in range(ranks)],
        values[0],
        group,
    )
    results: list[list[Tensor]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for one in bucket:
        if one.owner != me:
            continue
        whole = values[0].new_empty(one.which[1] - one.which[0], *one.stack.shape[1:])
        origin = (one.which[0], 0, 0)
        for place in range(ranks):
            if (target := one.cut(whole, origin, place)) is not None:
                target.copy_(gathered[place][taken[place] : taken[place] + target.numel()].view(target.shape))
                taken[place] += target.numel()
        result = step(one, whole)
        for place in range(ranks):
            if (part := one.cut(result, origin, place)) is not None:
                results[place].append(part)
    back = _all_to_all(
        results,
        [sum(_volume(one.part_of(me)) for one in bucket if one.owner == place) for place in range(ranks)],
        values[0],
        group,
    )
    taken = [0] * ranks
    received: list[Tensor | None] = []
    for one, own in zip(bucket, sent, strict=True):
        if own is None:
            received.append(None)
            continue
        start = taken[one.owner]
        received.append(back[one.owner][start : start + own.numel()].view(own.shape))
        taken[one.owner] += own.numel()
    return received


def _volume(box: Box | None) -> int:
    return 0 if box is None else math.prod(end - start for start, end in box)


def _all_to_all(
    sent: Sequence[Sequence[Tensor]], expected: Sequence[int], like: Tensor, group: ProcessGroup | None
) -> Sequence[Tensor]:
    """For each rank of the group, the tensors that it sent to this one, flattened into one row."""
    rows = [x.reshape(-1) for parts in sent for x in parts]
    given = torch.cat(rows) if rows else like.new_empty(0)
    found = like.new_empty(sum(expected))
    dist.all_to_all_single(found, given, list(expected), [sum(x.numel() for x in parts) for parts in sent], group=group)
    return found.split(list(expected))


# Assignment of work to ranks.
ENOUGH = 1.02  # times the least possible load of the busiest rank


def assign(work: Sequence[int], busy: Sequence[int]) -> list[int]:
    """Divide pieces of work over ranks. The longest pieces go first, each to the rank with the least work. Then pieces move from
    the busiest rank to others, or change places, as long as that lowers its load.

    Args:
        work: the work of each piece.
        busy: the work that each rank already has.

    Returns:
        The rank of each piece: the same on all ranks, given the same arguments.
    """
    loads, owners = list(busy), [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += work[i]
    least = ENOUGH * max(sum(loads) / len(loads), *busy, *work, 0)
    while max(loads) > least and _handed_over(work, owners, loads):
        pass
    return owners


def _handed_over(work: Sequence[int], owners: list[int], loads: list[int]) -> bool:
    """Whether one piece that moves, or two that change places, lowered the busiest rank's load."""
    busiest = max(range(len(loads)), key=loads.__getitem__)
    of_rank: list[dict[int, int]] = [{} for _ in loads]  # work -> a piece of this size
    for i, owner in enumerate(owners):
        of_rank[owner].setdefault(work[i], i)
    best: tuple[int, int, int, int | None] | None = None
    for other, pieces in enumerate(of_rank):
        gap = loads[busiest] - loads[other]
        for given, i in of_rank[busiest].items():
            for taken, j in [(0, None), *pieces.items()]:
                if 0 < (less := given - taken) < gap:
                    left = max(loads[busiest] - less, loads[other] + less)
                    if best is None or left < best[0]:
                        best = left, other, i, j
    if best is None:
        return False
    _, other, i, j = best
    less = work[i] - (0 if j is None else work[j])
    owners[i] = other
    if j is not None:
        owners[j] = busiest
    loads[busiest] -= less
    loads[other] += less
    return True
