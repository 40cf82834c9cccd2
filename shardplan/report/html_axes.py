"""The mesh axes on a page: the purpose of each, and where each module is on them."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.compiler.lower import Program
from shardplan.compiler.lower.describe import placement
from shardplan.core.layout import Layout
from shardplan.core.mesh import AXES, Axis, MeshSizes
from shardplan.core.module_program import ModuleProgram
from shardplan.core.stages import PipelineCut
from shardplan.styles.backends import BACKENDS

from .html_parts import table, text

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
