"""A program as text for people: what a plan does to each module, and what a step communicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from shardplan.compiler.lower import Program
from shardplan.compiler.lower.describe import leaving, placement, share, slicing
from shardplan.compiler.lower.expected_collectives import COLLECTIVES, expected_collectives
from shardplan.core.by_key import by_key
from shardplan.core.layout import R
from shardplan.core.mesh import MeshSizes
from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleInfo, ModuleTree, ParameterInfo, full_name

from .color import Paint
from .short_names import fold_names
from .table import table
from .text import place_text
from .width import printable

WIDTH = 120  # columns of text that is not for a terminal
HEADER = ("module, and what a rank holds", "style and moves", "count", "bytes", "plan")
LAYOUTS = "I: whole, complete gradient; R: whole, partial gradient; V(d): split in dim d; P: partial sum"
NUMERIC = {2, 3}  # right-aligned columns
BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
}
UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class ShownParameter:
    """A parameter of a module, or of equal modules; the numbers are sums over these.

    Args:
        name: its short name.
        text: placement and shape on one rank (the rank with the largest part, where they differ).
        whole: the number of elements in the unsharded module(s); 0 for a parameter that is tied to an earlier one.
        local: the number of elements on one rank.
        size: the bytes of the local elements.
    """

    name: str
    text: str
    whole: int
    local: int
    size: int

    def times(self, n: int) -> ShownParameter:
        return replace(self, whole=self.whole * n, local=self.local * n, size=self.size * n)


@dataclass(frozen=True, slots=True)
class Row:
    """A module, or equal modules of repeated layers.

    Args:
        name: the module's name, folded where it represents several.
        styles: the styles of the rules for it and for its single parameters.
        lines: the places of these rules.
        parameters: the parameters that it owns.
        moves: the moves of its arguments and of its output.
        axes: where it is on the mesh axes, for pages.
    """

    name: str
    styles: tuple[str, ...]
    lines: tuple[str, ...]
    parameters: tuple[ShownParameter, ...]
    moves: tuple[str, ...]
    axes: tuple[str, ...] = ()


def program_text(
    program: Program, sources: SourceMap, *, color: bool, all_rows: bool = False, width: int = WIDTH
) -> str:
    """The table of modules (equal repeated layers as one row, unless `all_rows`), the totals, and the collectives.

    Args:
        width: the largest number of columns of a line.
    """
    paint = Paint(color)
    rows = tuple(module_rows(program, sources))
    shown = rows if all_rows else fold(rows)
    header = [paint("strong", title) for title in HEADER]
    modules = table([header, *(line for row in shown for line in _lines(row))], right=NUMERIC, width=width)
    below = [*_totals(program, rows), "", *_collectives(program, paint)]
    legend = ["", *table([(LAYOUTS,)], width=width)] if any(row.moves for row in rows) else []
    return "\n".join([*modules, "", *table([(line,) for line in below], width=width), *legend])


def module_rows(program: Program, sources: SourceMap) -> Iterator[Row]:
    """One row for each module that the program concerns, in the model's order."""
    tree = program.resolved.tree
    first_name = first_names(tree)
    for module in program.modules.values():
        styles, lines = styles_and_lines(program.resolved, module.name, sources)
        info = tree.modules[module.name]
        yield Row(
            name=module.name,
            styles=styles,
            lines=lines,
            parameters=tuple(_shown(parameter, info, program.resolved, first_name) for parameter in module.parameters),
            moves=tuple(_moves(module)),
        )


def styles_and_lines(resolved: ResolvedPlan, name: str, sources: SourceMap) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The styles of the rules for a module and its single parameters, and the rules' places."""
    rules = _rules(resolved, name)
    lines = (place_text(rule.location, sources).rpartition(":")[0] for rule in rules)
    return tuple(dict.fromkeys(rule.style for rule in rules)), tuple(dict.fromkeys(lines))


def first_names(tree: ModuleTree) -> dict[str, str]:
    """The other names of tied parameters -> the first name."""
    return {name: group[0] for group in tree.tied for name in group[1:]}


def fold(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Join rows that differ only in the numbers of their names to one row with the sums."""

    def template(row: Row) -> Row:
        return replace(row, name=".".join("#" if part.isdecimal() else part for part in row.name.split(".")))

    folded = []
    for group in by_key((template(row), row) for row in rows).values():
        names = fold_names(row.name for row in group)
        if len(names) > 1:  # the names are not a product of ranges: each row keeps its own numbers
            folded += group
        else:
            parameters = tuple(owned.times(len(group)) for owned in group[0].parameters)
            folded.append(replace(group[0], name=names[0], parameters=parameters))
    return tuple(folded)


def local_shape(parameter: ParameterProgram, info: ParameterInfo, sizes: MeshSizes) -> tuple[int, ...]:
    """The shape on the first rank, which has the largest part: dims that the axis does not divide are split
    in ceil-chunks."""
    if parameter.dim is None:
        return info.shape
    ranks = sizes.of(parameter.stored.axis)
    return tuple(-(-size // ranks) if i == parameter.dim else size for i, size in enumerate(info.shape))


def byte_text(size: int) -> str:
    """Decimal units: "262.1 MB"."""
    value = float(size)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def _shown(
    parameter: ParameterProgram, module: ModuleInfo, resolved: ResolvedPlan, first_name: Mapping[str, str]
) -> ShownParameter:
    info = module.parameter(parameter.name)
    assert info is not None, (module.name, parameter.name)
    shape = local_shape(parameter, info, resolved.sizes)
    text = f"{placement(parameter)} {list(shape)}" + (", partial gradient" if parameter.computed == R else "")
    name = full_name(module.name, parameter.name)
    if (apart := resolved.matrices.get(name)) is not None:
        text += f", {len(apart.sizes)} matrices"
    tied = first_name.get(name)
    if tied is not None:
        return ShownParameter(parameter.name, f"{text}, tied to {tied}", 0, 0, 0)
    local = ParameterInfo(parameter.name, shape).numel
    return ShownParameter(parameter.name, text, info.numel, local, local * BYTES.get(info.dtype, 4))


def _rules(resolved: ResolvedPlan, name: str) -> list[Rule]:
    """The rules for a module and for its single parameters."""
    inside = [a for parameter, a in resolved.parameters.items() if resolved.tree.owner(parameter) == name]
    own = resolved.modules.get(name)
    return [assignment.rule for assignment in ([own] if own else []) + inside]


def _moves(module: ModuleProgram) -> Iterator[str]:
    for boundary in module.enter:
        argument = {"*": "floats ", None: ""}.get(boundary.argument, f"{boundary.argument} ")
        yield f"in {argument}{boundary.src} -> {boundary.dst}{', again in backward' if boundary.regather else ''}"
    for buffer in module.buffers:
        yield f"buffer {buffer.name} {share(buffer)}"
    for part in module.slices:
        yield f"in {part.argument} {slicing(part)}"
    if module.leave is not None:
        yield f"out {leaving(module)}"
    if module.group is not None:
        count = len(module.group.parameters)
        yield f"{count} gradients in one all-reduce" if count > 1 else "1 gradient all-reduced"


def _lines(row: Row) -> Iterator[tuple[str, ...]]:
    """The row's cells: its name and below it its parameters, next to the styles and below them the moves."""
    owned = ((f"  {p.name}  {p.text}", f"{p.local:,}", byte_text(p.size)) for p in row.parameters)
    names, counts, sizes = zip((row.name or "(model)", "", ""), *owned, strict=True)
    for cells in zip_longest(names, (*row.styles, *row.moves), counts, sizes, row.lines, fillvalue=""):
        yield tuple(map(printable, cells))


def _totals(program: Program, rows: Iterable[Row]) -> list[str]:
    owned = [parameter for row in rows for parameter in row.parameters]
    whole, local, size = (sum(getattr(p, name) for p in owned) for name in ("whole", "local", "size"))
    tp = program.resolved.sizes.tp or 1
    return [f"tp {tp}: {whole:,} parameters, {local:,} ({byte_text(size)}) on each rank"]


def _collectives(program: Program, paint: Paint) -> list[str]:
    counts = expected_collectives(program.modules) if (program.resolved.sizes.tp or 1) > 1 else {}
    lines = [paint("strong", "collectives of a training step on the tp axis")]
    for when, counter in counts.items():
        said = ", ".join(f"{counter[op]} {op.replace('_', '-')}" for op in COLLECTIVES if counter[op])
        lines.append(f"  {when}: {said or 'none'}")
    lines += _trade(program)
    return lines if counts else [f"{lines[0]}: none"]


def _trade(program: Program) -> list[str]:
    """The trades that the plan could make instead: memory for communication, and collectives that overlap computation."""
    moves = [boundary for module in program.modules.values() for boundary in module.enter]
    again = sum(boundary.regather for boundary in moves)
    kept = sum(boundary.src.kind == "V" and boundary.dst.kind in ("R", "I") for boundary in moves) - again
    lines = []
    if kept:
        lines.append(
            f"  {kept} gathered values are kept for backward; with `regather` their shards are, for {kept} more all-gathers"
        )
    if again:
        lines.append(
            f"  {again} gathered values are gathered again in backward (`regather`): {again} of its all-gathers; only their shards "
            "are kept until then"
        )
    section = program.resolved.compile
    if section is not None and section.async_tensor_parallel:
        lines.append(
            "  in compiled modules inductor splits products and overlaps them with gathers and scatters (`async_tensor_parallel`): "
            "the same bytes in more and smaller pieces"
        )
    return lines
