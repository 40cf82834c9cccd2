"""Making the changes that `validate` proposes for a plan: those that it has tried, and those of help lines, which are tried here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan.compiler.user_inputs import AnyModel
from shardplan.core.diagnostics import Diagnostic, Edit, Rewrite
from shardplan.core.plan import Plan
from shardplan.core.report import Report
from shardplan.core.sources import SourceFile
from shardplan.core.suggest import with_known_names
from shardplan.language.parsing import parse_text
from shardplan.language.plan_edits import edit_plan
from shardplan.language.plan_files import is_file

from .check import validate
from .one_at_a_time import one_at_a_time

ROUNDS = 32  # a change may reveal what another finding had hidden


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """What `fix_plan` returns.

    Args:
        before, after: the text of the plan.
        report: the report on the plan after the changes.
        changes: the number of changed places.
    """

    before: str
    after: str
    report: Report
    changes: int


@with_known_names
@one_at_a_time
def fix_plan(
    model: AnyModel, file: str, *, progress: Callable[[str], None] = lambda text: None, **options: Any
) -> FixedPlan:
    """Make the changes that `validate` proposes for a YAML plan, until none of them helps. The file is not written.

    A change is kept only if it leaves fewer errors, or only other errors that it revealed. Changes proposed by findings about layouts were
    tried on the reduced model, and are made together. Changes of help lines (a misspelt word, a key without a match) are made one by one.

    Args:
        model, options: as for `validate`.
        file: the plan's file.
        progress: called with what is being done.

    Raises:
        ValueError: a plan in JSON, or a built-in plan: there is no YAML file to change.
    """
    if not is_file(file) or file.lower().endswith(".json"):
        raise ValueError(f"{file} is not a YAML file that could be changed")
    report = validate(model, file, progress=progress, **options)
    source = report.sources.files.get(file)
    if source is None or not source.lines:
        return FixedPlan("", "", report, 0)
    before = after = "\n".join(source.lines)
    changes = 0
    tried: set[str] = {before}
    for _ in range(ROUNDS):
        for text, count, known in _candidates(source, report):
            if text in tried:
                continue
            tried.add(text)
            again, read = _again(model, text, file, report, progress, options)
            if _better(report, again, known=known):
                after, report, source, changes = text, replace(again, plans=report.plans), read, changes + count
                break
        else:
            break
    return FixedPlan(before, after, report, changes)


def _candidates(source: SourceFile, report: Report) -> Iterator[tuple[str, int, bool]]:
    """The plans that may be better: (text, number of changes, whether the changes were tried before)."""
    if report.stages != ("plan",):
        text, made = edit_plan(source, [edit for d in report.errors for edit in d.edits])
        if made:
            yield text, len(made), True
    for diagnostic in report.errors:
        yield from ((text, 1, False) for text in _proposed(source, diagnostic))


def _proposed(source: SourceFile, diagnostic: Diagnostic) -> Iterator[str]:
    from shardplan.language.plan_rewrites import rewrite_plan

    for proposal in diagnostic.proposals:
        if isinstance(proposal, Rewrite):
            if (text := rewrite_plan(source, proposal)) is not None:
                yield text
        elif isinstance(proposal, Edit):
            text, made = edit_plan(source, [proposal])
            if made:
                yield text


def _again(
    model: AnyModel, text: str, file: str, report: Report, progress: Callable[[str], None], options: dict[str, Any]
) -> tuple[Report, SourceFile]:
    """Validate the changed plan as the first one was."""
    parsed = parse_text(text, file=file, folder=Path(file).parent)
    if parsed.plan is None:
        again = replace(report, diagnostics=parsed.diagnostics, sources=parsed.sources, stages=("plan",))
    else:
        progress("validating the changed plan")
        again = validate(model, Plan(parsed.plan, parsed.sources, parsed.diagnostics), progress=progress, **options)
    return again, parsed.sources.files[file]


def _better(before: Report, after: Report, *, known: bool) -> bool:
    """Whether errors are gone, and each error that is left was there before or comes from a later stage.

    Args:
        known: the change was tried on its own: new errors of the same stage were hidden by the error that it fixed.
    """
    old = Counter((d.code, d.message) for d in before.errors)  # the same misspelling may be on several lines
    left = Counter((d.code, d.message) for d in after.errors)
    if left & old or not old:
        return left < old
    return not left or known or len(after.stages) > len(before.stages)
