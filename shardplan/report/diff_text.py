"""The differences between two plans, for people: on a terminal, and as a comment on a pull request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardplan.compiler.lower.expected_collectives import COLLECTIVES
from shardplan.core.by_key import by_key
from shardplan.core.plan import variant_words
from shardplan.core.plan_changes import Checkpoints, CostChange, ModuleChange, PlanDiff, RuleChange, Said, VariantCost
from shardplan.core.sources import SourceMap

from .color import Paint
from .estimate_text import bytes_text, mesh_text, seconds_text
from .short_names import brace_names, fold_names
from .table import table
from .text import place_text
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


# The differences between two plans, in words that text, Markdown and HTML share.
Numbers = tuple[str, str, str]  # the quantity, its value with the old plan, its value with the new one
MOST = 6  # folded names on a line


def names_text(names: tuple[str, ...]) -> str:
    """The first few names, folded over layers and alternatives; with their number where there are several."""
    folded = brace_names(fold_names(names))
    first = ", ".join(name or "(model)" for name in folded[:MOST])
    return first + (f", ... ({len(names)} in all)" if len(folded) > MOST else "")


def value_text(value: str | tuple[str, ...]) -> str:
    """The text of a field's value."""
    return value if isinstance(value, str) else names_text(value)


def said_text(said: tuple[Said, ...]) -> str:
    return ", ".join(one.text for one in said) or "no rule"


def lines_text(change: RuleChange) -> str:
    """ "old.yaml:3 -> new.yaml:5"."""
    sides = map(_lines, (change.old, change.new))
    return " -> ".join(side or "-" for side in sides)


def _lines(said: tuple[Said, ...]) -> str:
    places = (place_text(one.location, SourceMap()) for one in said)
    return ", ".join(dict.fromkeys(place.rpartition(":")[0] or place for place in places))


def title(diff: PlanDiff) -> str:
    """The compared plans."""
    of_model = ""
    if diff.model is not None and diff.sizes is not None:
        mesh = mesh_text(diff.sizes) if diff.sizes.world_size > 1 else "tp 1"
        of_model = f", for {diff.model} on {mesh}"
    return f"{diff.old} -> {diff.new}{of_model}"


def numbers(cost: CostChange) -> Iterator[Numbers]:
    """The costs of a variant with each plan, one row for each cost."""
    yield _row(cost, "parameters on a rank, before data parallelism", _parameters)
    yield _row(cost, "collectives on tp, forward", lambda one: _collectives(one.collectives, "forward"))
    yield _row(cost, "collectives on tp, backward", lambda one: _collectives(one.collectives, "backward"))
    if any(side is not None and side.estimate is not None for side in (cost.old, cost.new)):
        yield _row(cost, "memory of a rank at the peak", _peak)
        yield _row(cost, "sent by a rank in a step", _sent)
    if any(side is not None and side.estimate is not None and side.estimate.bound for side in (cost.old, cost.new)):
        yield _row(cost, "least time of a step", _bound)


def _row(cost: CostChange, what: str, of: Callable[[VariantCost], str]) -> Numbers:
    old, new = ("not there" if side is None else of(side) for side in (cost.old, cost.new))
    return what, old, new


def _parameters(cost: VariantCost) -> str:
    return f"{cost.parameters:,} ({bytes_text(cost.size)})"


def _collectives(counts: Mapping[str, Mapping[str, int]], when: str) -> str:
    counter = counts.get(when, {})
    return ", ".join(f"{counter[op]} {op.replace('_', '-')}" for op in COLLECTIVES if counter.get(op)) or "none"


def _peak(cost: VariantCost) -> str:
    return "-" if cost.estimate is None else bytes_text(cost.estimate.memory.total)


def _sent(cost: VariantCost) -> str:
    return "-" if cost.estimate is None else bytes_text(sum(one.bytes for one in cost.estimate.traffic))


def _bound(cost: VariantCost) -> str:
    if cost.estimate is None or cost.estimate.bound is None:
        return "-"
    return f"{seconds_text(cost.estimate.bound.seconds)} (bounded by: {cost.estimate.bound.by})"


def checkpoint_lines(made: Checkpoints) -> tuple[str, str]:
    weights = "weights: readable with both plans" if made.weights else "weights: not readable"
    states = "readable with both plans" if made.states else "not known to be readable"
    return weights, f"training states: {states} ({made.reason})"


def verdict(diff: PlanDiff) -> str:
    """The last line, which says whether training differs."""
    if diff.model is None:
        count = _counted(len(diff.rules), "rule"), _counted(len(diff.fields), "field")
        return f"{' and '.join(count)} differ" if diff.differs else "rules and sections are the same"
    if not diff.differs:
        return "training is the same: every rank stores, computes and sends the same"
    modules = sum(len(change.names) for change in diff.modules)
    parts = [f"{_counted(modules, 'module')} in {_counted(len(diff.modules), 'change')}"] if modules else []
    parts += [_counted(len(diff.fields), "field")] if diff.fields else []
    parts += [
        f"{variant_words(cost.section)} only with {diff.new if cost.old is None else diff.old}"
        for cost in diff.costs
        if (cost.old is None) != (cost.new is None)
    ]
    return f"training differs: {', '.join(parts)}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
