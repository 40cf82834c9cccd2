"""Writing the changes that `validate` proposes into a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardplan.compiler.user_inputs import AnyModel
from shardplan.core.plan import Plan
from shardplan.core.report import Report

from .check import validate

ROUNDS = 8  # a change may bring to light what another finding had hidden


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """What `fix_plan` returns.

    Args:
        before, after: the text of the plan.
        report: of the plan as it is after the changes.
        changes: how many rules were changed.
    """

    before: str
    after: str
    report: Report
    changes: int


def fix_plan(
    model: AnyModel, file: str, *, progress: Callable[[str], None] = lambda text: None, **options: Any
) -> FixedPlan:
    """A YAML plan with the changes that `validate` tried and proposes, until it proposes none. The file is not written.

    A change is kept only if fewer errors are left, or others that it brought to light.

    Args:
        model, options: as for `validate`.
        file: the plan's file.
        progress: called with what is being done.

    Raises:
        ValueError: a plan in JSON or a built-in one: there is no YAML file to change.
    """
    from shardplan.language.parsing import parse_text
    from shardplan.language.plan_edits import edit_plan
    from shardplan.language.plan_files import is_file

    if not is_file(file) or file.lower().endswith(".json"):
        raise ValueError(f"{file} is not a YAML file that could be changed")
    report = validate(model, file, progress=progress, **options)
    source = report.sources.files.get(file)
    if source is None or not source.lines or report.stages == ("plan",):
        return FixedPlan("", "", report, 0)
    before = after = "\n".join(source.lines)
    changes = 0
    tried: set[str] = {before}
    for _ in range(ROUNDS):
        edits = [edit for d in report.diagnostics if d.is_error for edit in d.edits]
        text, made = edit_plan(source, edits)
        if not made or text in tried:
            break
        tried.add(text)
        parsed = parse_text(text, file=file, folder=Path(file).parent)
        if parsed.plan is None:  # a change that cannot be written like that
            break
        plan = Plan(parsed.plan, parsed.sources, parsed.diagnostics)
        progress("validating the changed plan")
        again = validate(model, plan, progress=progress, **options)
        if not _better(report, again):
            break
        after, report, changes = text, replace(again, plans=report.plans), changes + len(made)
        source = parsed.sources.files[file]
    return FixedPlan(before, after, report, changes)


def _better(before: Report, after: Report) -> bool:
    """Whether errors are gone, and none of those that are left is worse: they were there before, or a later stage found them."""
    known = {(d.code, d.message) for d in before.errors}
    left = {(d.code, d.message) for d in after.errors}
    return left < known or not (left & known)
