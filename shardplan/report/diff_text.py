"""The differences between two plans, for people: on a terminal, and as a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.by_key import by_key
from shardplan.core.plan import variant_words
from shardplan.core.plan_changes import ModuleChange, PlanDiff, RuleChange

from .color import Paint
from .diff_words import (
    checkpoint_lines,
    lines_text,
    names_text,
    numbers,
    said_text,
    title,
    value_text,
    verdict,
)
from .table import table
from .width import printable


def diff_text(diff: PlanDiff, *, color: bool, width: int | None = None) -> str:
    """The text of the differences in rules, fields, modules, costs and checkpoints, and whether training differs.

    Args:
        width: the terminal's width in columns; without it, tables are as wide as their content.
    """
    paint = Paint(color)
    parts = [
        paint("strong", printable(title(diff))),
        *_rules(diff, paint, width),
        *_fields(diff, paint, width),
        *_modules(diff, paint),
        *_costs(diff, paint, width),
    ]
    if diff.checkpoints is not None:
        parts.append(
            "\n".join([paint("strong", "checkpoints"), *(f"  {x}" for x in checkpoint_lines(diff.checkpoints))])
        )
    parts.append(paint("warning" if diff.differs else "good", printable(verdict(diff))))
    return "\n\n".join(parts)


def _rules(diff: PlanDiff, paint: Paint, width: int | None) -> Iterator[str]:
    for section, changes in by_section(diff.rules).items():
        rows = [
            (
                f"  {printable(names_text(change.names))}",
                *map(printable, _sides(change)),
                printable(lines_text(change)),
            )
            for change in changes
        ]
        yield "\n".join([paint("strong", f"rules, {variant_words(section)}"), *table(rows, width=width)])


def _sides(change: RuleChange) -> tuple[str]:
    return (f"{said_text(change.old)} -> {said_text(change.new)}",)


def by_section(changes: tuple[RuleChange, ...]) -> dict:
    """Variant -> its changes."""
    return by_key((change.section, change) for change in changes)


def _fields(diff: PlanDiff, paint: Paint, width: int | None) -> Iterator[str]:
    if diff.fields:
        rows = [(f"  {one.name}", printable(f"{value_text(one.old)} -> {value_text(one.new)}")) for one in diff.fields]
        yield "\n".join([paint("strong", "sections"), *table(rows, width=width)])


def _modules(diff: PlanDiff, paint: Paint) -> Iterator[str]:
    section = None
    lines: list[str] = []
    for change in diff.modules:
        if change.section != section:
            section = change.section
            lines += ["", paint("strong", f"modules, {variant_words(section)}")]
        lines += _module(change, paint)
    if lines:
        yield "\n".join(lines[1:])


def _module(change: ModuleChange, paint: Paint) -> list[str]:
    lines = [f"  {printable(names_text(change.names))}"]
    lines += [paint("error", f"  - {printable(fact)}") for fact in change.gone]
    return lines + [paint("good", f"  + {printable(fact)}") for fact in change.added]


def _costs(diff: PlanDiff, paint: Paint, width: int | None) -> Iterator[str]:
    for cost in diff.costs:
        rows = [(f"cost, {variant_words(cost.section)}", "before", "after")]
        rows += [(f"  {what}", old, new) for what, old, new in numbers(cost)]
        head, *rest = table(rows, width=width)
        yield "\n".join([paint("strong", head), *rest])


def diff_markdown(diff: PlanDiff) -> str:
    """The same as `diff_text`, for a comment on a pull request: the verdict comes first, and long lists are folded."""
    parts = [f"### shardplan diff: {_code(title(diff))}", f"**{_escaped(verdict(diff))}**"]
    if diff.rules:
        rows = ["| | rules | before | after | lines |", "|---|---|---|---|---|"]
        rows += [
            f"| {variant_words(r.section)} | {_code(names_text(r.names))} | {_code(said_text(r.old))} | "
            f"{_code(said_text(r.new))} | {_escaped(lines_text(r))} |"
            for r in diff.rules
        ]
        parts.append("\n".join(rows))
    if diff.fields:
        rows = ["| field | before | after |", "|---|---|---|"]
        parts.append(
            "\n".join(
                [
                    *rows,
                    *(
                        f"| {_code(f.name)} | {_code(value_text(f.old))} | {_code(value_text(f.new))} |"
                        for f in diff.fields
                    ),
                ]
            )
        )
    for cost in diff.costs:
        rows = [f"| {variant_words(cost.section)} | before | after |", "|---|---|---|"]
        changed = (f"| {what} | {old} | {new if old == new else f'**{new}**'} |" for what, old, new in numbers(cost))
        parts.append("\n".join([*rows, *changed]))
    if diff.checkpoints is not None:
        parts.append("\n".join(f"- {_escaped(line)}" for line in checkpoint_lines(diff.checkpoints)))
    if diff.modules:
        parts.append(_folded(diff))
    return "\n\n".join(parts)


def _folded(diff: PlanDiff) -> str:
    lines = []
    for change in diff.modules:
        lines.append(f"  {names_text(change.names)} ({variant_words(change.section)})")
        lines += [f"- {fact}" for fact in change.gone] + [f"+ {fact}" for fact in change.added]
    body = "\n".join(map(printable, lines)).replace("```", "'''")
    return (
        f"<details><summary>modules that are stored or run differently</summary>\n\n```diff\n{body}\n```\n\n</details>"
    )


def _code(text: str) -> str:
    """A text as code in a table's cell."""
    return f"`{printable(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in printable(text))
