"""A step of a pipeline in closed form: its time, and the memory of a rank.

GPipe runs all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965). 1F1B and its interleaved form run some forwards
ahead, then a forward and a backward in turn (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), as torch's classes do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.core.schedules import Schedule


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The bytes that a stage keeps: for each micro-batch, from its forward to its backward, and for the gradients from its first backward on."""

    kept: int
    gradients: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Args:
    in_flight: the stages of a rank -> micro-batches whose backward is not done.
    trained: the stages among them that have gradients.
    """

    in_flight: dict[int, int]
    trained: frozenset[int]


def step_seconds(ranks: Sequence[float], micro_batches: int, stages_per_rank: int, hand_over: float = 0.0) -> float:
    """The time until the last rank is done: the slowest rank's work and, before its first micro-batch and after its last one, a stage of each
    other rank. With equal stages, this bubble is (pp - 1) / (stages_per_rank * micro_batches) of the rank's work. With fewer micro-batches
    than ranks, a rank also waits between its stages.

    Args:
        ranks: for each pp rank, the time of one micro-batch in all of its stages, forward and backward.
        hand_over: the time to send from a stage to the next one.
    """
    pp, slowest = len(ranks), max(ranks)
    between = (stages_per_rank - 1) * max(0, pp - micro_batches) * sum(ranks) / (pp * stages_per_rank)
    return micro_batches * slowest + (sum(ranks) - slowest) / stages_per_rank + between + 2 * (pp - 1) * hand_over


def ahead(schedule: Schedule, pp: int, micro_batches: int, rank: int, stages_per_rank: int) -> int:
    """The number of forwards that a rank has run in its stages before its first backward; never more are in flight."""
    if schedule.name == "gpipe":
        return micro_batches
    if not schedule.multiple:
        return min(micro_batches, pp - rank)
    first = (stages_per_rank - 1) * _round(pp, micro_batches) + 2 * (pp - 1 - rank) + 1
    return min(micro_batches * stages_per_rank, first)


def fullest(schedule: Schedule, pp: int, micro_batches: int, rank: int, stages: Sequence[StageBytes]) -> Moment:
    """The moment at which a rank has the most bytes; among several, one with the most micro-batches in flight.

    Args:
        stages: the stages of all ranks.
    """
    own, size = range(rank, len(stages), pp), _round(pp, micro_batches)
    count, total = len(own), micro_batches * len(own)
    first = ahead(schedule, pp, micro_batches, rank, count)

    def ran(forwards: int) -> list[int]:
        """The number of forwards of each stage: one round of micro-batches goes through each stage in turn."""
        times, left = divmod(forwards, size * count)
        return [times * size + min(size, max(0, left - i * size)) for i in range(count)]

    def at(backwards: int) -> Moment:
        forward = ran(min(first + backwards, total))
        backward = ran(backwards)[::-1]  # the last stage runs its backward first
        there = {stage: f - b for stage, f, b in zip(own, forward, backward, strict=True) if f > b}
        return Moment(there, frozenset(stage for stage, b in zip(own, backward, strict=True) if b))

    def fullness(moment: Moment) -> tuple[int, int]:
        kept = sum(stages[stage].kept * n for stage, n in moment.in_flight.items())
        return kept + sum(stages[stage].gradients for stage in moment.trained), sum(moment.in_flight.values())

    # All rounds are the same; when the forwards have ended and each stage has gradients, the bytes only decrease.
    begin, end = max(0, total - first - size * count), max(total - first, (count - 1) * size) + 1
    return max(map(at, range(begin, min(end, total) + 1)), key=fullness)


def _round(pp: int, micro_batches: int) -> int:
    """The number of micro-batches that go through a stage before the rank's next stage runs."""
    return micro_batches // max(1, micro_batches // pp)
