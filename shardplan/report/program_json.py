"""A program as JSON."""

from __future__ import annotations

from shardplan.compiler.lower import Program
from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.core.layout import R, V
from shardplan.core.mesh import MeshSizes
from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleInfo, full_name

from .program_text import first_names, local_shape, styles_and_lines
from .records import (
    VERSION,
    CollectiveRecord,
    InputMoveRecord,
    Mesh,
    ModuleRecord,
    OutputMoveRecord,
    ParameterRecord,
    ProgramReport,
)


def program_record(program: Program, sources: SourceMap, model: str) -> ProgramReport:
    """One record for each module that the program has something to say of, in the model's order."""
    resolved = program.resolved
    tp, tied = resolved.sizes.tp or 1, first_names(resolved.tree)
    modules = []
    for name, module in program.modules.items():
        held = (
            _parameter(p, resolved.tree.modules[name], resolved.sizes, tied.get(full_name(name, p.name)))
            for p in module.parameters
        )
        modules.append(_module(module, *styles_and_lines(resolved, name, sources), tuple(held)))
    counts = expected_collectives(program.modules) if tp > 1 else {}
    collectives = (
        CollectiveRecord(direction, collective, count)
        for direction, counter in counts.items()
        for collective, count in counter.items()
    )
    return ProgramReport(
        "program",
        VERSION,
        resolved.plan.name,
        model,
        Mesh.of(resolved.sizes),
        resolved.sequence_parallel,
        tuple(modules),
        tuple(collectives),
    )


def _module(
    module: ModuleProgram, styles: tuple[str, ...], rules: tuple[str, ...], parameters: tuple[ParameterRecord, ...]
) -> ModuleRecord:
    return ModuleRecord(
        module.name,
        styles,
        rules,
        parameters,
        (
            *(InputMoveRecord(m.argument, str(m.src), str(m.dst), m.regather) for m in module.enter),
            *(InputMoveRecord(part.argument, str(R), str(V(part.dim)), False) for part in module.slices),
        ),
        OutputMoveRecord(str(module.leave.src), str(module.leave.dst)) if module.leave is not None else None,
        tuple(full_name(*one) for one in module.group.parameters) if module.group is not None else (),
    )


def _parameter(
    parameter: ParameterProgram, module: ModuleInfo, sizes: MeshSizes, tied_to: str | None
) -> ParameterRecord:
    info = module.parameter(parameter.name)
    assert info is not None, (module.name, parameter.name)
    shape = local_shape(parameter, info, sizes)
    return ParameterRecord(
        parameter.name, str(parameter.stored), str(parameter.computed), parameter.parts, shape, info.dtype, tied_to
    )
