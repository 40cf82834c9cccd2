"""Pipeline schedules: the stages per rank, and the demands on the call. One record for each class of
torch.distributed.pipelining, which runs them."""

from __future__ import annotations

from dataclasses import dataclass

from .suggest import closest


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule. Stage s of n ranks is on rank s % n.

    Args:
        name: as users write it.
        torch_class: the name for `torch.distributed.pipelining.schedules.get_schedule_class`.
        stages_per_rank: the number of stages on each rank. Above 1, the user may request another number, and
            micro-batches go in rounds of about as many as there are ranks; rounds must be of one size.
        full: whether there must be a micro-batch for each stage.
    """

    name: str
    torch_class: str
    stages_per_rank: int = 1
    full: bool = False

    @property
    def multiple(self) -> bool:
        """Whether torch's class takes a list of stages; the others take one stage."""
        return self.stages_per_rank > 1

    def misfit(self, pp: int, micro_batches: int, stages_per_rank: int | None = None) -> str | None:
        """Why the schedule cannot run with these numbers of ranks, micro-batches and stages; None if it can."""
        count = stages_per_rank or self.stages_per_rank
        if count != self.stages_per_rank and not self.multiple:
            return f"{self.name} has 1 stage on each rank, not {count}"
        if self.full and micro_batches < pp * count:
            return f"{self.name} needs a micro-batch for each of its {pp * count} stages, there are {micro_batches}"
        if self.multiple and micro_batches % (rounds := max(1, micro_batches // pp)):
            return (
                f"{self.name} runs micro-batches in rounds of at least pp = {pp}: {micro_batches} of them are not {rounds} "
                "rounds of one size"
            )
        return None


SCHEDULES: dict[str, Schedule] = {
    one.name: one
    for one in (
        Schedule("gpipe", "GPipe"),
        Schedule("1f1b", "1F1B", full=True),
        Schedule("interleaved", "Interleaved1F1B", stages_per_rank=2),
    )
}


def schedule_of(word: str) -> Schedule:
    """The schedule of that name, ours or that of torch's class; case does not matter, and `-` is `_`.

    Raises:
        TypeError: not a text.
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
