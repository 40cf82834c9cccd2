"""The lengths that a rank's run splits. The number of ranks must divide them in a model without a configuration,
which would tell its heads."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.compiler.check.divisibility import FEATURES
from shardplan.compiler.check.facts import Facts
from shardplan.compiler.check.vocabulary_rows import vocabulary_rows
from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import starred

from .rank_run import run_rank
from .run import RecordedModel
from .typed_modules import boundaries


def split_lengths(plan: ResolvedPlan, recorded: RecordedModel) -> Mapping[int, str]:
    """Length of an evenly split dim of a value -> where the first such value is made.

    Rows of a vocabulary are left out, as their chunks need not be even. So are groups of a norm: ranks share them if there are fewer groups.

    Args:
        plan: the plan, bound to the reduced model, without findings and without slices of the sequence.
        recorded: the reduced model; its sizes are the model's own.
    """
    ranks = plan.sizes.tp or 1
    run = run_rank(recorded.model, recorded.inputs, recorded.atoms, boundaries(plan), recorded.reference, ranks, 0)
    facts = Facts(plan)
    rows = {stored.size for stored in facts.splits if vocabulary_rows(facts, stored)} | facts.vocabularies
    grouped = {one.name for one in plan.assignments.values() if one.rule.groups is not None}
    found: dict[int, str] = {}
    for event in run.events:
        whole = None if event.module in grouped else recorded.reference.at.get(event.place)
        if whole is None or event.kind != "op" or whole.name != event.name or len(whole.outputs) != len(event.outputs):
            continue
        for mine, theirs in zip(event.outputs, whole.outputs, strict=True):
            shapes = (run.values[mine].shape, recorded.reference.values[theirs].shape)
            differing = [(a, b) for a, b in zip(*shapes, strict=False) if a != b]
            if (
                len(shapes[0]) == len(shapes[1])
                and len(differing) == 1
                and differing[0][0] * ranks == differing[0][1]
                and differing[0][1] not in rows
            ):
                source = f", {event.source.short}: `{event.source.text}`" if event.source else ""
                found.setdefault(differing[0][1], f"{starred(event.module) or 'the model'}{source}")
    return found


def misfit(lengths: Mapping[int, str], tp: int, checked: int) -> Diagnostic | None:
    """The finding for a size that does not divide a length; the shortest such length.

    Args:
        checked: the size at which the lengths were seen.
    """
    wrong = sorted(length for length in lengths if length % tp)
    if not wrong:
        return None
    known = [str(size) for size in range(1, max(lengths) + 1) if all(length % size == 0 for length in lengths)]
    return Diagnostic(
        code=FEATURES,
        severity=Severity.ERROR,
        message=f"the model's code splits a dimension of length {wrong[0]}, which tp={tp} does not divide",
        notes=(lengths[wrong[0]], f"seen at tp={checked}, where the plan is right"),
        help=f"this plan and model allow tp {', '.join(known)}",
    )
