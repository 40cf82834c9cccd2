"""What no run of the reduced model reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.core.tree import block, full_name
from shardplan.layout import ModelLayouts
from shardplan.lower import Program

from .steps import Steps


def unreached_parameters(small: ModelLayouts, runs: Sequence[Steps]) -> Iterator[str]:
    """Trained parameters that get no gradient, or an exactly zero one, on any kind of input; frozen ones that nothing
    reads."""
    reached = {name for run in runs for name in run.gradients if name not in run.unreached}
    read = {
        bench.reference.parameters[number]
        for bench in small.benches
        for event in bench.reference.events
        if event.kind == "op"
        for number in event.inputs
        if number in bench.reference.parameters
    }
    groups = {name: group for group in small.tree.tied for name in group}
    for name, (_, parameter) in small.tree.parameters.items():
        names = groups.get(name, (name,))
        if not any(other in (reached if parameter.requires_grad else read) for other in names):
            yield name


def unreached_modules(small: ModelLayouts, program: Program) -> Iterator[str]:
    """Modules with a move that no run calls, and that have no parameters to speak for them."""
    called = {event.module for bench in small.benches for event in bench.reference.events if event.kind == "enter"}
    for name, module in program.modules.items():
        below = full_name(name, "")
        if (module.enter or module.leave) and name not in called:
            if not any(parameter.startswith(below) for parameter in small.tree.parameters):
                yield name


def touched(missing: Sequence[str], program: Program, small: ModelLayouts) -> Iterator[str]:
    """Of what no run reached, what the plan splits, and what lies in a block that the plan moves values in."""
    moving = {block(name) for name, module in program.modules.items() if module.enter or module.leave}
    split = {
        full_name(name, p.name) for name, module in program.modules.items() for p in module.parameters if p.dim is not None
    }
    for name in missing:
        owner = small.tree.parameters[name][0].name if name in small.tree.parameters else name
        if name in split or block(owner) in moving:
            yield name
