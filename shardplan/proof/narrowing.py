"""Finding which of a call's changes (a switch, padding, embeddings instead of ids) makes a sharded model differ or raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from shardplan.core.diagnostics import Code, Diagnostic, PlanError
from shardplan.core.report import Comparison, NumericProof

from .failure import sharded_run
from .threads import OnRanks, rank_threads

DIFFERS = Code("SP420")

Run = Callable[[OnRanks, Collection[str]], Sequence[Comparison]]


def only_with(run: Run, changes: Sequence[str], ranks: int) -> tuple[str, ...]:
    """The calls of the model that show what a proof found: each single change that does or, if none does alone, the smallest set
    of changes, in one text. Empty where the plain call is wrong too.

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
        return ()
    alone = [one for one in changes if len(changes) == 1 or wrong((one,))]
    if alone:
        return tuple(alone)
    needed = list(changes)
    for one in changes:
        if wrong(fewer := [name for name in needed if name != one]):
            needed = fewer
    return (f"{' and '.join(needed)} together",)


def note_of(calls: Sequence[str]) -> str:
    """The note of a finding."""
    return f"only where the model is called with {' or '.join(calls)}"


def switches_in(calls: Sequence[str]) -> tuple[str, ...]:
    """The names of the arguments, if each call differs from the plain one in one switch."""
    found = [re.fullmatch(r"(\w+)=(True|False)", call) for call in calls]
    return tuple(one[1] for one in found if one) if all(found) else ()


def wrong_only_with(proof: NumericProof | None, findings: Sequence[Diagnostic]) -> tuple[str, ...]:
    """The switches without which a plan would be right, as far as a proof tells; none where it is wrong in another way.

    Args:
        findings: all that is said about the plan.
    """
    wrong = [one for one in proof.variants if not one.ok] if proof is not None else []
    if {one.code for one in findings if one.is_error} != {DIFFERS} or not all(one.only_with for one in wrong):
        return ()
    return switches_in(tuple(dict.fromkeys(call for one in wrong for call in one.only_with)))
