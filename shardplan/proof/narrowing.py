"""Finding which of a call's changes (a switch, padding, embeddings instead of ids) makes a sharded model differ or raise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from shardplan.core.diagnostics import PlanError
from shardplan.core.report import Comparison

from .failure import sharded_run
from .threads import OnRanks, rank_threads

Run = Callable[[OnRanks, Collection[str]], Sequence[Comparison]]


def only_with(run: Run, changes: Sequence[str], ranks: int) -> str:
    """The calls of the model that show what a proof found: each single change that does or, if none does alone, the smallest set
    of changes. Empty where the plain call is wrong too.

    Args:
        run: the sharded steps, with only these changes to the call.
        changes: all changes; together they show something wrong.
        ranks: the number of simulated ranks.
    """

    def wrong(told: Collection[str]) -> bool:
        try:  # ranks that raised are not called again
            with rank_threads(ranks) as on_ranks, sharded_run():
                return any(row.verdict == "differs" for row in run(on_ranks, told))
        except PlanError:
            return True

    if not changes or wrong(()):
        return ""
    alone = [one for one in changes if len(changes) == 1 or wrong((one,))]
    if alone:
        return " or ".join(alone)
    needed = list(changes)
    for one in changes:
        if wrong(fewer := [name for name in needed if name != one]):
            needed = fewer
    return f"{' and '.join(needed)} together"


def note_of(calls: str) -> str:
    """The note of a finding."""
    return f"only where the model is called with {calls}"
