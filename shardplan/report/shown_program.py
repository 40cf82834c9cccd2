"""A program as data: what `show --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.core.layout import Layout, R, V
from shardplan.core.mesh import MeshSizes
from shardplan.core.module_program import InputMove, OutputMove
from shardplan.core.sources import SourceMap
from shardplan.core.tree import full_name

if TYPE_CHECKING:
    from shardplan.compiler.lower import Program


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter of a module.

    Args:
        name: its name in the module.
        stored: the layout in which it is stored: I (whole) or V(dim).
        computed: the layout in which the module's code reads it: I, R, V(dim) or P.
        parts: the sizes of the packed parts along the split dim.
        matrices: the sizes of the matrices that an optimizer of whole matrices steps one by one; empty where it is one.
        shape: the shape of the shard on the rank that has the most.
        tied_to: the first name of the same parameter, where it is another one's.
    """

    name: str
    stored: Layout
    computed: Layout
    parts: tuple[int, ...]
    matrices: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None


@dataclass(frozen=True, slots=True)
class ShownModule:
    """What the plan does to one module.

    Args:
        styles: the styles of its rule and of its parameters' rules.
        rules: the places of these rules: file:line.
        inputs, output: the moves at its boundary.
        summed: parameters in it whose partial gradients one all-reduce sums.
    """

    name: str
    styles: tuple[str, ...]
    rules: tuple[str, ...]
    parameters: tuple[HeldParameter, ...]
    inputs: tuple[InputMove, ...]
    output: OutputMove | None
    summed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShownProgram:
    """What a plan does to the modules of a model. Layouts: I, whole with a complete gradient; R, whole with a partial gradient; V(d),
    split in dim d; P, a partial sum.

    Args:
        collectives: the collectives of a training step on the tp axis: forward or backward -> all_reduce, all_gather or reduce_scatter -> how many.
    """

    plan: str
    model: str
    sizes: MeshSizes
    sequence_parallel: bool
    modules: tuple[ShownModule, ...]
    collectives: Mapping[str, Mapping[str, int]]


def shown_program(program: Program, sources: SourceMap, model: str) -> ShownProgram:
    """Every module that the program concerns, in the model's order."""
    from shardplan.compiler.lower.expected_collectives import expected_collectives

    from .program_text import first_names, local_shape, styles_and_lines

    resolved = program.resolved
    tied, modules = first_names(resolved.tree), []
    for name, module in program.modules.items():
        held = []
        for one in module.parameters:
            info = resolved.tree.modules[name].parameter(one.name)
            assert info is not None, (name, one.name)
            full = full_name(name, one.name)
            shape, apart = local_shape(one, info, resolved.sizes), resolved.matrices.get(full)
            matrices = apart.sizes if apart is not None else ()
            layouts = one.stored, one.computed, one.parts
            held.append(HeldParameter(one.name, *layouts, matrices, shape, info.dtype, tied.get(full)))
        styles, rules = styles_and_lines(resolved, name, sources)
        inputs = (*module.enter, *(InputMove(R, V(part.dim), part.argument) for part in module.slices))
        summed = tuple(full_name(*one) for one in module.group.parameters) if module.group is not None else ()
        modules.append(ShownModule(name, styles, rules, tuple(held), inputs, module.leave, summed))
    counts = expected_collectives(program.modules) if (resolved.sizes.tp or 1) > 1 else {}
    asked = (resolved.plan.name, model, resolved.sizes, resolved.sequence_parallel)
    return ShownProgram(*asked, tuple(modules), counts)
