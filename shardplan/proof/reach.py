"""The parts of the reduced model that no run reached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower import Program
from shardplan.core.tree import ModuleTree, ancestors, block, full_name, parent
from shardplan.model.adapters import unwrapped
from shardplan.model.code_conditions import switched_off

from .steps import Steps


def unreached_parameters(reduced: ModelLayouts, runs: Sequence[Steps], kinds: Collection[str]) -> Iterator[str]:
    """Parameters that `runs`, on these kinds of input, do not reach: nothing reads them, or they are trained and their gradient is exactly
    zero. Parameters without elements are excluded.

    A parameter that is read and has no gradient at all is reached: it decides a choice (such as the top scores), and cannot be trained
    by gradients."""
    learned = {name for run in runs for name in run.gradients if name not in run.zero}
    stuck = {name for run in runs for name in run.zero} - learned
    read = _read(reduced, kinds)
    groups = {name: group for group in (*reduced.tree.tied, *_copies(reduced.tree)) for name in group}
    for name, (_, parameter) in reduced.tree.parameters.items():
        if not parameter.numel:
            continue
        names = groups.get(name, (name,))
        reached = learned | (read - stuck) if parameter.requires_grad else read
        if reached.isdisjoint(names):
            yield name


def _read(reduced: ModelLayouts, kinds: Collection[str], *, computing: bool = False) -> set[str]:
    """The parameters that an operation reads on some kinds of input; with `computing`, only operations with a non-empty result."""
    return {
        recorded.reference.parameters[number]
        for kind, recorded in zip(reduced.reduced_model.kinds, reduced.recorded_models, strict=True)
        if kind in kinds
        for event in recorded.reference.events
        if event.kind == "op"
        and (not computing or any(recorded.reference.values[output].numel() for output in event.outputs))
        for number in event.inputs
        if number in recorded.reference.parameters
    }


def _copies(tree: ModuleTree) -> Iterator[tuple[str, ...]]:
    """Groups of parameters that are used only one at a time (an adapter's trained copy, and the original)."""
    for copies in tree.copies.values():
        first = full_name(copies[0], "")
        for name in tree.parameters:
            if name.startswith(first):
                yield tuple(full_name(copy, name.removeprefix(first)) for copy in copies)


def unreached_modules(reduced: ModelLayouts, program: Program) -> Iterator[str]:
    """Modules with a move that no run calls, and that have no parameters."""
    called = {
        event.module
        for recorded in reduced.recorded_models
        for event in recorded.reference.events
        if event.kind == "enter"
    }
    for name, module in program.modules.items():
        below = full_name(name, "")
        if (module.enter or module.leave) and name not in called:
            if not any(parameter.startswith(below) for parameter in reduced.tree.parameters):
                yield name


def touched(missing: Sequence[str], program: Program, reduced: ModelLayouts) -> Iterator[str]:
    """The unreached parameters that the plan splits, or that are in a block in which the plan moves values. Two exceptions: a
    parameter whose result its block drops (the last block's queries of a stream that ends there), if the same parameter of
    another block, in modules of the same classes and under the same rule, was reached: it is proven there. And whole ones that the
    model's own flags switch off."""
    moving = {block(name) for name, module in program.modules.items() if module.enter or module.leave}
    split = {
        full_name(name, p.name)
        for name, module in program.modules.items()
        for p in module.parameters
        if p.dim is not None
    }
    computing, reached = (
        _read(reduced, reduced.reduced_model.kinds, computing=True),
        reduced.tree.parameters.keys() - {*missing},
    )
    proven = {_kind(program, reduced.tree, name) for name in reached}
    model = unwrapped(reduced.recorded_models[0].model)
    off = cache(lambda outer: switched_off(model.get_submodule(outer), model))
    for name in missing:
        if name in computing and _kind(program, reduced.tree, name) in proven:
            continue
        owner = reduced.tree.parameters[name][0].name if name in reduced.tree.parameters else name
        if name in split or (block(owner) in moving and not _is_in(off, name)):
            yield name


def _is_in(children: Callable[[str], frozenset[str]], name: str) -> bool:
    """Whether a parameter or module, or one around it, is among these children of the module that it is in."""
    return any(one.rpartition(".")[2] in children(parent(one)) for one in (name, *ancestors(name)[:-1]))


def _kind(program: Program, tree: ModuleTree, name: str) -> tuple[object, ...]:
    """A key that equivalent parameters of several blocks share: their place, the classes from the block down to their module,
    and the rule that stores them."""
    owner = tree.parameters[name][0].name
    classes = (tree.modules[one].class_name for one in (owner, *ancestors(owner)) if one.startswith(block(name)))
    assignments = program.resolved.assignments
    found = next((assignments[one] for one in (name, owner) if one in assignments), None)
    return tree.pattern(name), tuple(classes), None if found is None else id(found.rule)
