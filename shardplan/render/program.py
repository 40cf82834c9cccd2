"""A program for people: what a plan does to each module, and what a step communicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardplan.core.program import ModuleProgram, ParameterProgram
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ParameterInfo
from shardplan.lower import Program
from shardplan.lower.collectives import COLLECTIVES, expected_collectives
from shardplan.lower.describe import placement

from .color import Paint
from .names import fold_names
from .width import display_width, printable

HEADER = ("module", "rule", "parameters on each rank", "count", "bytes", "moves")
NUMERIC = {3, 4}  # columns set to the right
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a module, or equal modules of repeated layers.

    Args:
        name: the module's name, folded where it stands for several.
        rule: the style and the line of the plan that it comes from.
        parameters: each parameter's placement and its shape on one rank.
        whole: the number of parameters of the unsharded module(s).
        local: that number on one rank (the one with the most, where they differ).
        size: the bytes of the local ones.
        moves: the moves of its arguments and of its output.
    """

    name: str
    rule: str
    parameters: str
    whole: int
    local: int
    size: int
    moves: str


def program_text(program: Program, sources: SourceMap, *, color: bool, all_rows: bool = False) -> str:
    """The table of modules (repeated equal layers on one line, unless `all_rows`), the totals, the collectives."""
    paint = Paint(color)
    rows = tuple(module_rows(program, sources))
    shown = rows if all_rows else fold(rows)
    return "\n".join([*_table(shown, paint), "", *_totals(program, rows), "", *_collectives(program, paint)])


def module_rows(program: Program, sources: SourceMap) -> Iterator[Row]:
    """One row for each module that the plan or a parameter makes interesting, in the model's order. A tied parameter
    is counted where it stands first."""
    tp = program.resolved.sizes.tp or 1
    tree = program.resolved.tree
    counted_elsewhere = {name: group[0] for group in tree.tied for name in group[1:]}
    for module in program.modules.values():
        held = []
        whole = local = size = 0
        for how in module.parameters:
            info = tree.modules[module.name].parameter(how.name)
            assert info is not None, (module.name, how.name)
            first = counted_elsewhere.get(f"{module.name}.{how.name}" if module.name else how.name)
            held.append(_held(how, info, tp) + (f" = {first}" if first else ""))
            if first is None:
                n = _numel(local_shape(how, info, tp))
                whole, local, size = whole + info.numel, local + n, size + n * BYTES.get(info.dtype, 4)
        yield Row(module.name, _rule(program, module, sources), "; ".join(held), whole, local, size, _moves(module))


def fold(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows that differ in the numbers of their names only, as one row with the sums."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        template = ".".join("#" if part.isdecimal() else part for part in row.name.split("."))
        groups.setdefault(replace(row, name=template), []).append(row)
    folded = []
    for group in groups.values():
        names = fold_names(row.name for row in group)
        if len(names) > 1:  # no product of ranges: nothing is gained by writing them as one
            folded += group
        else:
            n = len(group)
            one = group[0]
            folded.append(replace(one, name=names[0], whole=one.whole * n, local=one.local * n, size=one.size * n))
    return tuple(folded)


def local_shape(how: ParameterProgram, info: ParameterInfo, tp: int) -> tuple[int, ...]:
    """The shape on the first rank, which has the most: dims that tp does not divide are split in ceil-chunks."""
    if how.dim is None:
        return info.shape
    return tuple(-(-size // tp) if i == how.dim else size for i, size in enumerate(info.shape))


def byte_text(size: int) -> str:
    """Decimal units: "262.1 MB"."""
    value = float(size)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def _held(how: ParameterProgram, info: ParameterInfo, tp: int) -> str:
    shape = "x".join(map(str, local_shape(how, info, tp))) or "scalar"
    gradient = ", partial gradient" if how.gradient == "partial" else ""
    return f"{how.name} {shape} {placement(how)}{gradient}"


def _numel(shape: tuple[int, ...]) -> int:
    return ParameterInfo("", shape).numel


def _rule(program: Program, module: ModuleProgram, sources: SourceMap) -> str:
    resolved = program.resolved
    assignments = [resolved.modules.get(module.name)]
    assignments += [a for name, a in resolved.parameters.items() if name.rpartition(".")[0] == module.name]
    texts = []
    for assignment in assignments:
        if assignment is not None:
            location = assignment.rule.location
            span = sources.span(location)
            texts.append(f"{assignment.rule.style} ({location.file}{f':{span.line}' if span else ''})")
    return ", ".join(dict.fromkeys(texts))


def _moves(module: ModuleProgram) -> str:
    texts = []
    for boundary in module.enter:
        argument = {"*": "every float: ", None: ""}.get(boundary.argument, f"{boundary.argument}: ")
        texts.append(f"in {argument}{boundary.src} -> {boundary.dst}")
    if module.leave is not None:
        texts.append(f"out {module.leave.src} -> {module.leave.dst}")
    if module.group:
        texts.append(f"{len(module.group)} gradients summed at once")
    return ", ".join(texts)


def _table(rows: Iterable[Row], paint: Paint) -> list[str]:
    cells = [HEADER]
    for row in rows:
        count, size = (f"{row.local:,}", byte_text(row.size)) if row.parameters else ("", "")
        cells.append((printable(row.name) or "(model)", printable(row.rule), row.parameters, count, size, row.moves))
    widths = [max(display_width(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = []
    for number, line in enumerate(cells):
        parts = []
        for i, cell in enumerate(line):
            blank = " " * (widths[i] - display_width(cell))
            parts.append(blank + cell if i in NUMERIC else cell + blank)
        text = "  ".join(parts).rstrip()
        lines.append(paint("strong", text) if number == 0 else text)
    return lines


def _totals(program: Program, rows: Iterable[Row]) -> list[str]:
    whole = sum(row.whole for row in rows)
    local = sum(row.local for row in rows)
    size = sum(row.size for row in rows)
    tp = program.resolved.sizes.tp or 1
    return [f"tp {tp}: {whole:,} parameters, {local:,} ({byte_text(size)}) on each rank"]


def _collectives(program: Program, paint: Paint) -> list[str]:
    counts = expected_collectives(program.modules)
    lines = [paint("strong", "collectives of a training step on the tp axis")]
    for when, counter in counts.items():
        said = ", ".join(f"{counter[op]} {op.replace('_', '-')}" for op in COLLECTIVES if counter[op])
        lines.append(f"  {when}: {said or 'none'}")
    return lines
