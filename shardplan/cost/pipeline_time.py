"""A schedule's table of actions, played with what each stage costs: how long a step takes, how much of it ranks wait, and how many
activations they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.core.schedules import Action, ActionTable


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro-batch in a stage (or any other unit), and what it keeps.

    Args:
        forward, inputs, weights: of the forward, of the gradients of its input, of those of its weights. A whole backward is
            the sum of the last two.
        kept: bytes that its forward keeps until the gradients of its weights are computed.
        gradients: bytes that its first backward makes, and that stay.
    """

    forward: float
    inputs: float
    weights: float
    kept: int = 0
    gradients: int = 0

    def of(self, action: Action) -> float:
        match action.kind:
            case "forward":
                return self.forward
            case "backward of inputs":
                return self.inputs
            case "backward of weights":
                return self.weights
            case "backward":
                return self.inputs + self.weights


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """One step of a pipeline.

    Args:
        seconds: until the last rank is done.
        busy: of each rank, the seconds in which it computes.
        kept: of each rank, what its forwards keep at the moment at which that and its gradients are the most bytes.
        in_flight: of each rank, its stages at that moment -> micro-batches whose backward is not done.
        trained: of each rank, the stages that have gradients at that moment.
        ends: of each rank, when each of its actions ends, in the table's order.
    """

    seconds: float
    busy: tuple[float, ...]
    kept: tuple[int, ...]
    in_flight: tuple[dict[int, int], ...]
    trained: tuple[frozenset[int], ...] = ()
    ends: tuple[tuple[float, ...], ...] = ()

    @property
    def bubble(self) -> float:
        """The share of the step, over all ranks, in which they wait: 0 to 1."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy)) if self.seconds else 0.0


def play(table: ActionTable, stages: Sequence[StageTime], hand_over: float = 0.0) -> PipelineTime:
    """The step of a table: each rank does its actions in order, each as soon as what it needs is there.

    Args:
        stages: what each costs, by its index.
        hand_over: seconds from the end of a stage on one rank to its neighbour's beginning on another.
    """
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # what ran -> when it ended, on which rank
    clocks, at = [0.0] * len(table), [0] * len(table)
    ends: list[list[float]] = [[] for _ in table]
    waiting = set(range(len(table)))
    while waiting:
        rank = waiting.pop()
        while at[rank] < len(table[rank]):
            action = table[rank][at[rank]]
            needed = _needs(action, len(stages))
            if any(need not in done for need in needed):
                break  # the rank that does it comes back to this one
            ready = (end + (hand_over if other != rank else 0.0) for end, other in (done[need] for need in needed))
            clocks[rank] = max(clocks[rank], *ready, 0.0) + stages[action.stage].of(action)
            made = _made(action)
            done[made] = clocks[rank], rank
            ends[rank].append(clocks[rank])
            at[rank] += 1
            readers = (action.stage + 1, action.stage - 1)
            waiting |= {rank_of[s] for s in readers if s in rank_of and rank_of[s] != rank}
    assert all(i == len(row) for i, row in zip(at, table, strict=True)), "the table waits for itself"
    busy = tuple(sum(stages[action.stage].of(action) for action in row) for row in table)
    moments = [_fullest(row, stages) for row in table]
    kept = tuple(sum(stages[stage].kept * count for stage, count in live.items()) for live, _ in moments)
    live, trained = tuple(live for live, _ in moments), tuple(trained for _, trained in moments)
    return PipelineTime(max(clocks), busy, kept, live, trained, tuple(map(tuple, ends)))


def _made(action: Action) -> tuple[str, int, int]:
    kind = "backward of inputs" if action.kind == "backward" else action.kind
    return kind, action.stage, action.micro_batch


def _needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """What must have run before an action: forwards go up the stages, gradients of inputs down."""
    stage, i = action.stage, action.micro_batch
    match action.kind:
        case "forward":
            return [("forward", stage - 1, i)] if stage else []
        case "backward of weights":
            return [("backward of inputs", stage, i)]
        case _:
            after = [("backward of inputs", stage + 1, i)] if stage < stages - 1 else []
            return [("forward", stage, i), *after]


def _fullest(row: Sequence[Action], stages: Sequence[StageTime]) -> tuple[dict[int, int], frozenset[int]]:
    """The moment at which a rank has the most bytes: the micro-batches of each stage, and the stages that have gradients. A stage's first
    backward makes these while it gives back what it kept. Of moments with as many bytes, the one with the most micro-batches."""
    live: dict[int, int] = {}
    trained: set[int] = set()
    most, found = (0, 0), (dict[int, int](), frozenset[int]())
    for action in row:
        stage = action.stage
        if action.kind == "forward":
            live[stage] = live.get(stage, 0) + 1
        elif action.kind != "backward of inputs":
            live[stage] -= 1
            trained.add(stage)
        kept = sum(stages[one].kept * count for one, count in live.items())
        size = kept + sum(stages[one].gradients for one in trained), sum(live.values())
        if size > most:
            most, found = size, ({one: count for one, count in live.items() if count}, frozenset(trained))
    return found
