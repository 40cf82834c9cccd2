"""The verdicts on many edits, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardplan.core.tree import starred

from .edits import Edit, pattern_of
from .judge import Subject, Verdict


@dataclass(frozen=True)
class Row:
    """One edit and what was said of it.

    Args:
        kind: of the edit.
        truth: "right", "wrong", "silent" (wrong, with the right loss), or "unread": no gradient reaches the edited modules,
            so that there is nothing to compare.
        verdict: "valid", "structure" (refused before the layout check), "layout".
        named: the first finding names the edited rule ("rule"), a module around or next to it ("parent"), or another.
        fixed: the help lines together fix the plan; None where there was nothing to fix or none was looked for.
        text: the edit and the findings.
    """

    kind: str
    truth: str
    verdict: str
    named: str | None
    fixed: bool | None
    text: str

    @property
    def disagrees(self) -> bool:
        return (
            self.truth != "unread" and (self.truth == "right") != (self.verdict == "valid") and not self.only_structure
        )

    @property
    def only_structure(self) -> bool:
        """A right plan that a structural check refuses for another reason than its numbers."""
        return self.truth == "right" and self.verdict == "structure"


def row_of(plan: str, subject: Subject, sequence_parallel: bool, edit: Edit, verdict: Verdict) -> Row:
    truth = "right" if verdict.right else "silent" if verdict.silent else "wrong"
    said = "valid" if verdict.valid else "structure" if verdict.structure else "layout"
    if truth == "right" and said == "layout" and _unread(subject, edit):
        truth = "unread"
    named = fixed = None
    findings = [d.message for d in verdict.structure] or [d.message for d in verdict.layout.diagnostics]
    if said == "layout" and truth != "right":
        named = _named(edit, verdict)
        fixed = verdict.fixed
    variant = "sequence parallel" if sequence_parallel else "tensor parallel"
    helps = [d.help for d in verdict.layout.diagnostics] if verdict.layout else []
    text = (
        f"{plan}={subject.name} tp={subject.tp} {variant}: {edit.kind}: {edit.what}\n"
        f"  numbers: {truth} {verdict.worst}\n  validate: {said} {findings[:2]}\n  help: {helps} {named} {fixed}"
    )
    return Row(edit.kind, truth, said, named, fixed, text)


def _unread(subject: Subject, edit: Edit) -> bool:
    """Whether no parameter of the edited modules has a gradient in any step of the unsharded model."""
    learned = {name for runs in subject.steps.values() for steps in runs.values() for name in steps.gradients}
    inside = tuple(f"{target}." for target in edit.targets)
    edited = [
        name
        for name in subject.tree.parameters
        if any(f"{written}.".startswith(inside) for written in (name, pattern_of(name)))
    ]
    return bool(edited) and learned.isdisjoint(edited)


def _named(edit: Edit, verdict: Verdict) -> str:
    first = verdict.layout.diagnostics[0]
    repair = verdict.layout.repairs[0]
    places = {starred(name) for name in first.modules}
    places |= {repair.pattern, *(starred(name) for name in repair.names)} if repair else set()
    if first.primary is not None:
        places |= {str(first.primary.location.path[-1])} if first.primary.location.path else set()
    targets = {starred(target) for target in edit.targets}
    owners = {place.rpartition(".")[0] for place in places} | places
    if targets & owners:
        return "rule"
    parents = {target.rpartition(".")[0] for target in targets} | targets
    return "parent" if parents & {p for place in owners for p in (place, place.rpartition(".")[0])} else "other"


def table(rows: Iterable[Row]) -> str:
    """Markdown: the confusion matrix by kind of edit, and how well the findings blame and fix."""
    rows = list(rows)
    lines = [
        "| edit | plans | wrong | refused | missed | silently wrong | missed | right | refused |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in (*sorted({row.kind for row in rows}), ""):
        some = [row for row in rows if row.kind == kind or not kind]
        wrong, silent = ([r for r in some if r.truth == truth] for truth in ("wrong", "silent"))
        right = [r for r in some if r.truth == "right" and not r.only_structure]
        numbers = (
            len(some),
            len(wrong),
            sum(r.verdict != "valid" for r in wrong),
            sum(r.verdict == "valid" for r in wrong),
            len(silent),
            sum(r.verdict == "valid" for r in silent),
            len(right),
            sum(r.verdict != "valid" for r in right),
        )
        lines.append(f"| {kind or '**all**'} | " + " | ".join(map(str, numbers)) + " |")
    by = Counter(row.verdict for row in rows if row.truth not in ("right", "unread"))
    lines += [
        "",
        f"Of the wrong plans the structural checks refuse {by['structure']}, the layout check {by['layout']}.",
    ]
    held = sum(row.only_structure for row in rows)
    lines.append(f"{held} more compute the right numbers, and are refused by a structural check for another reason.")
    unread = sum(row.truth == "unread" for row in rows)
    lines.append(f"{unread} more are refused in modules whose results nothing reads: there is no number to compare.")
    named = Counter(row.named for row in rows if row.named)
    if total := named.total():
        lines.append(
            f"The first finding of the layout check names the edited rule or its module in {_share(named['rule'], total)}, "
            f"a module around it in {_share(named['parent'], total)}."
        )
    fixed = [row.fixed for row in rows if row.fixed is not None]
    if fixed:
        lines.append(f"Its help lines fix the plan in {_share(sum(fixed), len(fixed))}.")
    return "\n".join(lines)


def _share(some: int, total: int) -> str:
    return f"{some} of {total} ({100 * some / total:.0f} %)"
