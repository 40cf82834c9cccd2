"""The modules of a model as a tree, each with its style and placement; and the flow of one block as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardplan.compiler.lower import Program
from shardplan.compiler.lower.describe import leaving, placement
from shardplan.core.layout import Layout
from shardplan.core.mesh import AXES, Axis, MeshSizes
from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.core.moves import move_ops
from shardplan.core.sources import SourceMap
from shardplan.core.stages import PipelineCut
from shardplan.styles.backends import BACKENDS

from .estimate_text import bytes_text
from .html_parts import axis_chip, chip, color, table, text
from .program_text import Row, fold, module_rows

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass
class _Node:
    name: str
    row: Row | None = None
    below: dict[str, _Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        own = sum(p.size for p in self.row.parameters) if self.row else 0
        return own + sum(node.size for node in self.below.values())


def tree_html(program: Program, sources: SourceMap, cut: PipelineCut | None = None) -> str:
    """The tree, with equal layers (of one stage) folded, and the bytes that a rank stores before data parallelism. The pointer, or a tap,
    shows what a module does and stores."""
    root = _Node("(model)")
    rows = module_rows(program, sources)
    placed = (replace(row, axes=axes_of(program, program.modules[row.name], cut)) for row in rows)
    for row in fold(placed):
        node = root
        for part in row.name.split(".") if row.name else ():
            node = node.below.setdefault(part, _Node(part))
        node.row = row
    return "".join(_node(node, "") for node in root.below.values()) or '<p class="dim">nothing</p>'


def styles_of(program: Program, sources: SourceMap) -> list[str]:
    """The styles that the tree shows, in the model's order."""
    return list(dict.fromkeys(style for row in module_rows(program, sources) for style in row.styles))


def _node(node: _Node, above: str) -> str:
    name = f"{above}.{node.name}" if above else node.name
    row = node.row
    marks = [chip(style) for style in row.styles] if row else []
    marks += [axis_chip(mark) for mark in row.axes] if row else []
    line = f'<span class="mono">{text(node.name)}</span> {" ".join(marks)}'
    if node.size:
        line += f' <span class="dim">{text(bytes_text(node.size))}</span>'
    title = "&#10;".join(map(text, _about(name, row))) if row else text(name)  # a line break in the hover
    if not node.below:  # an element with the focus shows its title, as fingers cannot hover
        return f'<div class="leaf" tabindex="0" title="{title}">{line}</div>'
    inside = "".join(_node(one, name) for one in node.below.values())
    return f'<details open><summary title="{title}">{line}</summary>{inside}</details>'


def _about(name: str, row: Row) -> Iterator[str]:
    yield name
    yield from (f"{p.name}: {p.text}, {p.local:,} on a rank, {bytes_text(p.size)}" for p in row.parameters)
    yield from row.moves
    yield from (f"rule: {line}" for line in row.lines)


@dataclass(frozen=True)
class _Step:
    """A line of the picture."""

    depth: int
    label: str
    style: str | None
    layouts: str
    collectives: tuple[str, ...]

    @property
    def title(self) -> str:
        return _cut(self.label if self.style is None else f"{self.label} · {self.style}")

    @property
    def said(self) -> str:
        return _cut(", ".join(self.collectives))


ROW, INDENT, LEFT, GAP = 34, 22, 26, 14
LETTER = 7.4  # pixels of a letter of the picture's font
LONGEST = 60  # letters; longer texts are cut


@dataclass(frozen=True)
class _Columns:
    """Widths in pixels that the longest text of each column needs."""

    box: int
    layouts: int
    collectives: int

    @classmethod
    def of(cls, steps: Sequence[_Step]) -> _Columns:
        def width(words: str) -> int:
            return round(LETTER * len(words)) + 18

        return cls(
            max(INDENT * step.depth + width(step.title) for step in steps),
            max(width(step.layouts) for step in steps),
            max(width(step.said) for step in steps),
        )

    @property
    def width(self) -> int:
        return LEFT + self.box + self.layouts + self.collectives + 2 * GAP


def flow_svg(program: Program, block: str, calls: Sequence[tuple[str, int]]) -> str:
    """The flow of one block, from top to bottom in the order in which its modules run. Boxes are modules; marks are the
    collectives of the forward and the backward."""
    steps = list(_steps(program, block, calls))
    if not steps:
        return '<p class="dim">no module repeats</p>'
    columns, height = _Columns.of(steps), ROW * len(steps) + 10
    parts = [
        (
            f'<div class="scroll"><svg viewBox="0 0 {columns.width} {height}" width="{columns.width}" height="{height}" role="img" '
            f'aria-label="{text(block)}"><line x1="14" y1="4" x2="14" y2="{height - 4}" stroke="currentColor" opacity=".35"/>'
        )
    ]
    for i, step in enumerate(steps):
        parts.append(_drawn(step, columns, 5 + i * ROW))
    return "".join([*parts, "</svg></div>"])


def _steps(program: Program, block: str, calls: Sequence[tuple[str, int]]) -> Iterator[_Step]:
    ends: list[tuple[int, str, ModuleProgram]] = []
    own = program.modules.get(block)
    if own is not None:
        yield from _entering("(the block)", 0, own)
    for below, depth in calls:
        while ends and ends[-1][0] >= depth:
            yield from _leaving(*ends.pop())
        module = program.modules.get(f"{block}.{below}")
        if module is None:
            continue
        yield from _entering(below, depth, module)
        ends.append((depth, below, module))
    while ends:
        yield from _leaving(*ends.pop())
    if own is not None:
        yield from _leaving(0, "(the block)", own)


def _entering(label: str, depth: int, module: ModuleProgram) -> Iterator[_Step]:
    moves = [f"in {move.argument or ''} {move.src} -> {move.dst}".replace("  ", " ") for move in module.enter]
    moves += [_parameter(p) for p in module.parameters if p.name == "weight" or len(module.parameters) == 1]
    found = tuple(
        word for move in module.enter if move.shared_with is None for word in _collectives(move.src, move.dst)
    )
    if module.group is not None:
        found += (f"backward: all-reduce, {len(module.group.parameters)} gradients",)
    yield _Step(depth, label, module.style, _cut(", ".join(moves)), found)


def _parameter(p: ParameterProgram) -> str:
    """The layout in which a parameter is stored, and read where this differs: a whole weight with a partial gradient is stored as I, read as R."""
    return f"{p.name} {p.stored}" + (f" read as {p.computed}" if p.computed != p.stored else "")


def _leaving(depth: int, label: str, module: ModuleProgram) -> Iterator[_Step]:
    if module.leave is not None:
        free = module.joins is not None or module.link == "source"
        found = () if free else tuple(_collectives(module.leave.src, module.leave.dst))
        yield _Step(depth, f"out of {label}", None, f"out {leaving(module)}", found)


def _collectives(src: Layout, dst: Layout) -> Iterator[str]:
    ops = move_ops(src, dst)
    assert ops is not None, (src, dst)
    for when, operation in (("forward", ops.forward), ("backward", ops.backward)):
        if operation in COLLECTIVES:
            yield f"{when}: {operation.replace('_', '-')}"


def _drawn(step: _Step, columns: _Columns, y: int) -> str:
    x = LEFT + INDENT * step.depth
    width = columns.box - INDENT * step.depth
    fill = color(step.style) if step.style else "none"
    inside = "on" if step.style else ""
    words = LEFT + columns.box + GAP
    parts = [
        f'<circle cx="14" cy="{y + 13}" r="4" fill="currentColor"/>',
        f'<rect x="{x}" y="{y}" width="{width}" height="26" rx="5" fill="{fill}" stroke="currentColor" stroke-opacity=".35"/>',
        f'<text class="{inside}" x="{x + 8}" y="{y + 17}">{text(step.title)}</text>',
        f"<title>{text(step.title)}</title>",
        f'<text x="{words}" y="{y + 17}">{text(step.layouts)}</text>',
    ]
    if step.collectives:
        left = words + columns.layouts
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{columns.collectives}" height="22" rx="11" fill="#f5a524"/>')
        parts.append(f'<text class="on" x="{left + 9}" y="{y + 17}">{text(step.said)}</text>')
    return f"<g>{''.join(parts)}</g>"


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


# The mesh axes on a page: the purpose of each, and where each module is on them.
PURPOSES = {
    Axis.PP: "stages of the model, one after the other",
    Axis.DP_REPLICATE: "copies of the model, each with other sequences",
    Axis.DP_SHARD: "other sequences on each rank; parameters, gradients and optimizer states are split",
    Axis.CP: "a slice of each sequence on every rank; where tokens meet, all of them or a share of the heads",
    Axis.EP: "experts, whole ones; its ranks are among those of dp_shard, cp and tp",
    Axis.TP: "parameters and what is computed with them",
}


def mesh_table(sizes: MeshSizes) -> str:
    """A table of the axes with several ranks; "" where there are none."""
    rows = [(axis, f"{sizes.of(axis):,}", text(PURPOSES[axis])) for axis in AXES if sizes.of(axis) > 1]
    return table(("axis", "ranks", "what it distributes"), rows, frozenset({1})) if rows else ""


def axes_of(program: Program, module: ModuleProgram, cut: PipelineCut | None) -> tuple[str, ...]:
    """Where a module is on the mesh, "tp: Shard(0)", for each axis that concerns it."""
    marks = [*_stored(module), *_sequence(program, module), *_data_parallel(program, module)]
    if cut is not None:
        stage = cut.stage_of(module.name)
        marks.append("pp: every stage" if stage is None else f"pp: stage {stage}")
    return tuple(dict.fromkeys(marks))


def _stored(module: ModuleProgram) -> Iterator[str]:
    for parameter in module.parameters:
        axis = parameter.stored.axis
        yield f"{axis}: {placement(parameter).replace(f' over {axis}', '')}"


def _sequence(program: Program, module: ModuleProgram) -> Iterator[str]:
    """Which values at a module's boundary are slices of the sequence."""
    if not program.sequence_parallel:
        return
    if any(_split(move.dst) for move in module.enter):
        yield "sp: computes on a slice"
    elif any(_split(move.src) for move in module.enter):
        yield "sp: gathers the sequence"
    if module.leave is not None and _split(module.leave.dst):
        yield "sp: returns a slice"


def _split(layout: Layout) -> bool:
    return layout.kind == "V" and layout.dim not in (-1, 0)


def _data_parallel(program: Program, module: ModuleProgram) -> Iterator[str]:
    resolved = program.resolved
    section, sizes = resolved.data_parallel, resolved.sizes
    if section is None:
        return
    if module.name in resolved.fsdp_units:
        yield "dp_shard: a unit"
    if not module.parameters:
        return
    backend = BACKENDS[section.backend]
    shards = sizes.dp_shard * sizes.cp
    over = "dp_shard x cp" if sizes.cp > 1 else "dp_shard"
    if module.over_ep and sizes.ep_shard > 1:
        yield f"dp_shard: over {sizes.ep_shard} ranks with the same experts"
    elif not module.over_ep and shards > 1:
        yield f"{over}: {'Shard(0)' if backend.fully_shard else 'Replicate'}"
    if sizes.dp_replicate > 1:
        yield "dp_replicate: Replicate"
