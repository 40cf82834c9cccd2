"""The lowering: one `ModuleProgram` for each module that owns a parameter or has a rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.layout import SEQ, I, P, R, V
from shardplan.core.plan import Assignment, ResolvedPlan
from shardplan.core.program import GradientGroup, InputMove, ModuleProgram, OutputMove, ParameterProgram
from shardplan.core.tree import ModuleInfo, full_name
from shardplan.styles import STYLES, Style, feature_dim
from shardplan.styles.links import Link, links
from shardplan.styles.stored import lower_parameters

from .arrivals import arrives, door_output, gathered
from .homes import home_of
from .program import Program
from .tables import with_tables


def lower(plan: ResolvedPlan, *others: ResolvedPlan) -> Program:
    """Lower a checked plan.

    Args:
        plan: the resolved plan, free of errors.
        others: other variants of the same plan, as which the model can then run too.
    """
    return Program(plan, {one.overlays: lower_modules(one) for one in (plan, *others)})


def lower_modules(plan: ResolvedPlan) -> Mapping[str, ModuleProgram]:
    """The module programs of one variant, by name, in the tree's order."""
    ends = links(plan)
    programs = {}
    for name, module in plan.tree.modules.items():
        assignment = plan.modules.get(name)
        also_reads = _also_reads(plan, module)
        if not (module.parameters or assignment or name in ends or also_reads):
            continue
        lowered = _lower_module(plan, module, assignment, ends.get(name))
        programs[name] = replace(lowered, also_reads=also_reads)
    return with_tables(plan.tree, _with_sums(plan, _with_groups(plan, programs)))


def split_parameters(plan: ResolvedPlan) -> frozenset[str]:
    """Full names of the parameters that are split over tp."""
    return frozenset(
        full_name(name, p.name)
        for name, module in plan.tree.modules.items()
        for p in lower_parameters(plan, module)
        if p.dim is not None
    )


def _lower_module(
    plan: ResolvedPlan, module: ModuleInfo, assignment: Assignment | None, link: Link | None
) -> ModuleProgram:
    parameters = lower_parameters(plan, module)
    if assignment is None:
        return ModuleProgram(module.name, parameters=parameters, link=link, layer=module.layer)
    style, rule = STYLES[assignment.rule.style], assignment.rule
    width = _output_width(module)
    return ModuleProgram(
        name=module.name,
        style=style.name,
        parameters=parameters,
        enter=_enter(plan, assignment, style),
        leave=_leave(plan, assignment, style, width),
        vocabulary=_rows(module) if style.splits_rows else None,
        features=width if style.features.means else None,
        link=link,
        logits=width if style.features.dtensor else None,
        tail=int(plan.tree.numbers[style.features.tail]) if style.features.tail else 0,
        outside=rule.read_outside,
        divide=rule.divide,
        layer=module.layer,
    )


def _also_reads(plan: ResolvedPlan, module: ModuleInfo) -> tuple[tuple[str, ParameterProgram], ...]:
    """What the layout check saw it read; of a module that did not run there (a vision tower without images), and that
    owns parameters and has no rule below it, all that is below it."""
    tree, prefix = plan.tree, full_name(module.name, "")
    if module.name in plan.elsewhere:
        names = plan.elsewhere[module.name]
    elif module.parameters and plan.modules.get(module.name) is None and not _named_below(plan, prefix):
        names = tuple(name for name in tree.parameters if name.startswith(prefix))
    else:
        names = ()
    found = []
    for name in names:
        owner, _ = tree.parameters[name]
        if owner is module:
            continue
        program = next(p for p in lower_parameters(plan, owner) if full_name(owner.name, p.name) == name)
        found.append((owner.name.removeprefix(prefix), program))
    return tuple(found)


def _named_below(plan: ResolvedPlan, prefix: str) -> bool:
    return any(name.startswith(prefix) and f"{name}." != prefix for name in (*plan.assignments, *plan.fsdp_units))


def _rows(module: ModuleInfo) -> int:
    """Of the table of an embedding."""
    table = module.parameter("weight")
    assert table is not None, module.name
    return table.shape[0]


def _output_width(module: ModuleInfo) -> int | None:
    weight = module.parameter("weight")
    if weight is None:
        return None
    dim = feature_dim(module.kind, "weight", "out", len(weight.shape))
    return weight.shape[dim] if dim is not None else None


def _enter(plan: ResolvedPlan, assignment: Assignment, style: Style) -> tuple[InputMove, ...]:
    if style.inside is None or not style.takes:
        return ()
    rule = assignment.rule
    inside = door_output(assignment) or style.inside
    src = style.takes[0]
    if R in style.takes and I in style.takes:
        src = arrives(plan, assignment.name)
    elif P in style.takes and any(STYLES[a.rule.style].until_door for a in plan.modules.values()):
        src = P
    if src == inside:
        return ()
    argument = "*" if style.argument == "floats" else rule.argument
    first = plan.shared_reads.get(assignment.name) if (src, inside) == (I, R) else None
    return (InputMove(src.at(rule.seq_dim), inside.at(rule.seq_dim), argument, rule.regather, first),)


def _leave(plan: ResolvedPlan, assignment: Assignment, style: Style, width: int | None) -> OutputMove | None:
    rule = assignment.rule
    src, dst = style.computes, style.hands
    if rule.output == "gather":
        src, dst = V(SEQ), gathered(plan, assignment.name)
    elif rule.output is not None:
        src, dst = P, I if rule.output == "all_reduce" else V(SEQ)
    elif style.until_door:
        dst = I  # where it does not stay partial until the door
    if src is None or dst is None or (src == dst and not style.until_door):
        return None
    size = width if src == V(-1) else None
    return OutputMove(src.at(rule.seq_dim), dst.at(rule.seq_dim), size)


def _with_groups(plan: ResolvedPlan, programs: dict[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Give each block the list of its parameters with partial gradients; a FSDP unit inside a block groups its own."""
    units = frozenset(plan.fsdp_units)
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, program in programs.items():
        trained = {p.name for p in plan.tree.modules[name].parameters if p.requires_grad}
        home = home_of(name, units)
        for parameter in program.parameters:
            if parameter.summed and parameter.name in trained:
                groups[home].append((name[len(home) :].lstrip(".") if home else name, parameter.name))
    for home, members in groups.items():
        base = programs.get(home) or ModuleProgram(home)
        programs[home] = replace(base, group=GradientGroup(tuple(members)))
    return {name: programs[name] for name in plan.tree.modules if name in programs}


def _with_sums(plan: ResolvedPlan, programs: Mapping[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Let partial sums wait for those that they are reduced with."""
    found = dict(programs)
    for one in plan.sums:
        for carrier in one.carriers:
            found[carrier] = replace(found[carrier], joins=one.closer)
        rule = f"`{one.rule.text}` of `{one.rule.pattern}` in {one.rule.location.file}"
        found[one.closer] = replace(found[one.closer], joined=one.carriers, sum_rule=rule)
        base = found.get(one.block) or ModuleProgram(one.block)
        found[one.block] = replace(base, collects=(*base.collects, one.closer))
    return {name: found[name] for name in plan.tree.modules if name in found}
