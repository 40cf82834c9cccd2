"""Pipeline schedules: which stages a rank has, and what they ask of the call. One record for each class of
torch.distributed.pipelining, which runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .suggest import closest

# How stages are laid on n ranks. "loop": stage s is on rank s % n. "v": down and up again, so that rank r has the stages r and
# 2n - 1 - r, and the first and the last stage are on one rank.
StageOrder = Literal["loop", "v"]
# "backward" is both halves: the gradients of a stage's input, which the stage before waits for, and those of its weights.
ActionKind = Literal["forward", "backward", "backward of inputs", "backward of weights"]


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does next: one micro-batch through one stage. Both count from 0."""

    kind: ActionKind
    stage: int
    micro_batch: int


ActionTable = tuple[tuple[Action, ...], ...]  # of each rank of the pp axis, its actions in order


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule.

    Args:
        name: as users write it.
        torch_class: the name for `torch.distributed.pipelining.schedules.get_schedule_class`.
        stages_per_rank: how many stages each rank has, unless the user asks for another number.
        fixed: whether no other number of them works.
        order: how stages are laid on ranks.
        splits_backward: whether the gradients of inputs and of weights are computed in two actions. Such a schedule computes
            wrong gradients with FSDP2 that reshards after forward (torch 2.13), and does not compile.
        rounds: whether micro-batches go in rounds of about as many as there are ranks, which must be of one size.
        full: whether there must be a micro-batch for each stage.
    """

    name: str
    torch_class: str
    stages_per_rank: int = 1
    fixed: bool = True
    order: StageOrder = "loop"
    splits_backward: bool = False
    rounds: bool = False
    full: bool = False

    @property
    def multiple(self) -> bool:
        """Whether torch's class takes a list of stages; the others take one stage."""
        return self.stages_per_rank > 1

    def stages_of(self, rank: int, pp: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
        """The stages of a rank of the pp axis, in the order in which a batch runs through them."""
        count = stages_per_rank or self.stages_per_rank
        return tuple(stage for stage in range(pp * count) if self.rank_of(stage, pp) == rank)

    def rank_of(self, stage: int, pp: int) -> int:
        """The rank of the pp axis that has a stage."""
        lap, place = divmod(stage, pp)
        return pp - 1 - place if self.order == "v" and lap % 2 else place

    def misfit(self, pp: int, micro_batches: int, stages_per_rank: int | None = None) -> str | None:
        """Why the schedule cannot run so many micro-batches on so many ranks and stages; None where it can."""
        count = stages_per_rank or self.stages_per_rank
        if count != self.stages_per_rank and self.fixed:
            return f"{self.name} has {_stages(self.stages_per_rank)} on each rank, not {count}"
        if self.full and micro_batches < pp * count:
            return f"{self.name} needs a micro-batch for each of its {pp * count} stages, there are {micro_batches}"
        if self.rounds and micro_batches % (rounds := max(1, micro_batches // pp)):
            return (
                f"{self.name} runs micro-batches in rounds of at least pp = {pp}: {micro_batches} of them are not {rounds} "
                "rounds of one size"
            )
        return None


def _stages(count: int) -> str:
    return f"{count} stage" if count == 1 else f"{count} stages"


SCHEDULES: dict[str, Schedule] = {
    one.name: one
    for one in (
        Schedule("gpipe", "GPipe"),
        Schedule("1f1b", "1F1B", full=True),
        Schedule("interleaved", "Interleaved1F1B", 2, fixed=False, rounds=True),
        Schedule("looped", "LoopedBFS", 2, fixed=False),
        Schedule("zero_bubble", "InterleavedZeroBubble", 2, fixed=False, splits_backward=True, rounds=True),
        Schedule("zbv", "ZBVZeroBubble", 2, order="v", splits_backward=True),
        Schedule("dualpipev", "DualPipeV", 2, order="v", splits_backward=True, full=True),
    )
}


def schedule_of(word: str) -> Schedule:
    """The schedule of that name, ours or the one of torch's class; letters may be of either case, and `-` is `_`.

    Raises:
        TypeError: no text.
        ValueError: no such schedule.
    """
    if not isinstance(word, str):
        raise TypeError(f"schedule must be a name, not {word!r}")
    plain = word.lower().replace("-", "_")
    for one in SCHEDULES.values():
        if plain in (one.name, one.torch_class.lower()):
            return one
    near = closest(plain, SCHEDULES)
    hint = f"did you mean {near}?" if near else f"the schedules are {', '.join(SCHEDULES)}"
    raise ValueError(f"there is no pipeline schedule {word!r}: {hint}")
