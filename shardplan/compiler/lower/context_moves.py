"""The moves over the axis cp, in addition to those over tp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardplan.core.layout import Layout, V
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ContextProgram, InputMove, ModuleProgram, OutputMove, OutsideReads
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import full_name
from shardplan.styles.bound import BoundModule, bound_modules

from .heads_over_cp import with_heads


def with_context(plan: ResolvedPlan, programs: Mapping[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """The programs of a variant with the moves over cp. A module may need the whole sequence while modules below it
    make its moves over tp. Those then make its moves over cp too, as both axes move one value (`core.nesting`)."""
    assert plan.on_cp is not None, plan.overlays
    found, inside = with_heads(plan, programs)
    for name, bound in bound_modules(plan.on_cp).items():
        if bound.name in inside:
            continue
        moves = _moves(plan, bound)
        if moves is None:
            continue
        leaving = tuple(_leaving(name, moves, programs))
        entering = tuple(_entering(name, moves, programs))
        for other in leaving:
            _put(found, other, ContextProgram(moves.style, leave=moves.leave))
        for other, argument in entering:
            one = replace(moves.enter[0], argument=argument)
            _put(found, other, ContextProgram(moves.style, enter=(one,)))
        own = replace(moves, enter=() if entering else moves.enter, leave=None if leaving else moves.leave)
        if own.enter or own.leave or own.outside:
            _put(found, name, own)
    return {name: found[name] for name in plan.tree.modules if name in found}


def _put(found: dict[str, ModuleProgram], name: str, moves: ContextProgram) -> None:
    base = found.get(name) or ModuleProgram(name)
    before = base.on_cp
    if before is not None:
        moves = replace(moves, enter=(*before.enter, *moves.enter), leave=moves.leave or before.leave)
    found[name] = replace(base, on_cp=moves)


def _moves(plan: ResolvedPlan, bound: BoundModule) -> ContextProgram | None:
    """What a rule for cp does at its module; None without one."""
    if bound.style is None or bound.assignment is None:
        return None
    enter = tuple(
        InputMove(one.sources[0].on(Axis.CP), one.destination.on(Axis.CP), one.argument, one.regather)
        for one in bound.boundary.inputs
        if one.sources[0] != one.destination
    )
    output = bound.boundary.output
    leave = OutputMove(output.source.on(Axis.CP), output.destination.on(Axis.CP)) if output and output.moves else None
    outside = None
    if positions := bound.boundary.outside:
        tokens = V(bound.assignment.rule.seq_dim).on(Axis.CP)
        outside = OutsideReads(positions, tokens, plan.only_hooks_read(bound.name, positions))
    return ContextProgram(bound.style.name, enter, leave, outside)


def _leaving(name: str, moves: ContextProgram, programs: Mapping[str, ModuleProgram]) -> Iterator[str]:
    """The modules below that turn a mixer's output into slices over tp, if the mixer does not."""
    if not moves.enter or moves.leave is None or _splits(programs.get(name), moves.leave.dst):
        return
    prefix = full_name(name, "")
    for other, program in programs.items():
        if other.startswith(prefix) and other != name and _splits(program, moves.leave.dst):
            yield other


def _splits(program: ModuleProgram | None, layout: Layout) -> bool:
    return program is not None and program.leave is not None and program.leave.dst.dim == layout.dim


def _entering(
    name: str, moves: ContextProgram, programs: Mapping[str, ModuleProgram]
) -> Iterator[tuple[str, str | None]]:
    """The modules below, and their arguments, that gather the mixer's input over tp, if the mixer does not."""
    if len(moves.enter) != 1 or moves.enter[0].src.kind != "V":
        return
    dim, own = moves.enter[0].src.dim, programs.get(name)
    if own is not None and any(move.src.dim == dim for move in own.enter):
        return
    prefix = full_name(name, "")
    for other, program in programs.items():
        if other.startswith(prefix) and other != name:
            for move in program.enter:
                if move.src.kind == "V" and move.src.dim == dim:
                    yield other, move.argument
