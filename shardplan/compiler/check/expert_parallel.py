"""Experts that are distributed whole: the sizes of the axis ep, the modules that the rules name, and excluded
combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.mesh import VIEWED, Axis, MeshSizes
from shardplan.core.plan import Assignment, section_path
from shardplan.core.tree import ModuleInfo, ancestors, full_name, named
from shardplan.styles.backends import BACKENDS
from shardplan.styles.expert_shards import expert_dim
from shardplan.styles.stored_parameters import distributed_experts

from .check_words import field_label
from .facts import Facts

SIZES = Code("SP391")
UNEVEN = Code("SP392")
NO_EXPERTS = Code("SP393")
NO_STACK = Code("SP394")
COMBINED = Code("SP395")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """Checks the sizes, if the plan has the section, then the rules of all sections: those that need the axis ep must be in this one."""
    resolved = facts.resolved
    rules = {name: a for name, a in resolved.modules.items() if facts.style(a).experts is not None}
    misplaced = {
        name: a
        for name, a in rules.items()
        if facts.style(a).exchanges and section_path(a.section)[0] != "expert_parallel"
    }
    yield from _of_rules(facts, misplaced, _misplaced)
    with_ep = "expert_parallel" in resolved.overlays
    sizes = list(_sizes(facts)) if with_ep else []
    yield from sizes
    if with_ep and not rules:
        yield _error(
            NO_EXPERTS,
            f"the mesh axis ep has size {resolved.sizes.ep}, but the plan distributes no experts",
            None,
            "add a rule such as `model.layers.*.mlp.experts: ep_dispatch` under `expert_parallel`, or use a mesh without the axis ep",
        )
    modules = resolved.tree.modules
    unfit = {name: why for name in rules if (why := _not_stacked(modules[name])) is not None}
    yield from _of_rules(facts, rules, lambda _, name, assignment: unfit.get(name))
    fitting = {name: a for name, a in rules.items() if name not in {*unfit, *misplaced}}
    if not sizes:
        yield from _of_rules(facts, fitting, _uneven)
    yield from _of_rules(facts, fitting, _adapted)
    yield from _of_rules(facts, resolved.assignments, _inside)
    if with_ep:
        yield from _combined(facts)


def _error(code: Code, message: str, place: Label | None, help: str, modules: tuple[str, ...] = ()) -> Diagnostic:
    return Diagnostic(code=code, severity=Severity.ERROR, message=message, primary=place, help=help, modules=modules)


# (code, message about `{names}`, text at the rule, help)
Reason = tuple[Code, str, str, str]


def _of_rules(
    facts: Facts, assignments: Mapping[str, Assignment], reason: Callable[[Facts, str, Assignment], Reason | None]
) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    groups = by_key(
        ((assignment.rule.location, why), name)
        for name, assignment in assignments.items()
        if (why := reason(facts, name, assignment)) is not None
    )
    for (location, (code, message, label, help)), names in groups.items():
        yield _error(code, message.replace("{names}", named(names)), Label(location, label), help, tuple(names))


def _mesh(facts: Facts) -> MeshSizes:
    """The sizes to check, also if no size of tp is given."""
    return replace(facts.resolved.sizes, tp=facts.tp)


def _sizes(facts: Facts) -> Iterator[Diagnostic]:
    if (why := _mesh(facts).ep_misfit) is not None:
        over = ", ".join(VIEWED)
        help = f"use an ep that divides the product of {over}, and is a multiple or a part of tp"
        yield _error(SIZES, why, None, help)


def _misplaced(facts: Facts, name: str, assignment: Assignment) -> Reason:
    style = assignment.rule.style
    return (
        NO_EXPERTS,
        f"`{style}` distributes experts over the axis ep, but `{assignment.section}` applies without it",
        f"stands under `{assignment.section}`",
        "move the rule to `expert_parallel`",
    )


def _not_stacked(module: ModuleInfo) -> Reason | None:
    if (why := _no_stack(module)) is None:
        return None
    return (
        NO_STACK,
        f"{{names}} is not a stack of experts: {why}",
        "distributes experts",
        "name the module that has the stacks of experts, or leave them to tensor parallelism",
    )


def _no_stack(module: ModuleInfo) -> str | None:
    """Why a module is not a stack of experts."""
    owned = [p for p in module.parameters if p.adapter is None]
    if not owned:
        return "it has no parameters of its own"
    counts = {p.name: p.shape[0] if p.shape else 0 for p in owned}
    if len(set(counts.values())) > 1:
        return f"the first dims of its parameters differ ({', '.join(f'{name} {n}' for name, n in counts.items())})"
    return (
        None if all(len(p.shape) > 1 for p in owned if not p.name.endswith("bias")) else "its parameters have one dim"
    )


def _uneven(facts: Facts, name: str, assignment: Assignment) -> Reason | None:
    sizes, style = _mesh(facts), facts.style(assignment)
    parameters = facts.resolved.tree.modules[name].parameters
    count, ep, tp = parameters[0].shape[0], sizes.ep, sizes.of(Axis.TP)
    label = "distributes them"
    if not style.exchanges and "expert_parallel" not in facts.resolved.overlays:
        return None  # split over tp like any other parameter
    if not style.exchanges and ep != tp:
        return (
            UNEVEN,
            f"`{style.name}` distributes experts over tp, but ep is {ep} and tp is {tp}",
            label,
            "use `ep_dispatch`, or as many ep ranks as tp ranks",
        )
    if count % ep:
        fitting = [str(n) for n in range(2, count + 1) if count % n == 0 and sizes.viewed % n == 0]
        help = f"use ep {' or '.join(fitting)}" if fitting else f"use a mesh with an ep that divides {count}"
        return UNEVEN, f"ep={ep} does not divide the {count} experts of {{names}}", label, help
    if not style.exchanges or facts.resolved.data_parallel is None:
        return None
    local = {p.name: (count // ep, *p.shape[1:]) for p in parameters}
    odd = next((name for name, shape in local.items() if expert_dim(shape, sizes.ep_shard) is None), None)
    if odd is None:
        return None
    return (
        UNEVEN,
        f"ep_shard = {sizes.ep_shard} divides no dim of {odd} of {{names}}, which is {list(local[odd])} on each ep rank",
        label,
        "use a larger ep",
    )


def _inside(facts: Facts, name: str, assignment: Assignment) -> Reason | None:
    experts = distributed_experts(facts.resolved, name)
    if experts is None or (assignment.is_parameter and facts.resolved.tree.owner(name) == experts):
        return None
    return (
        COMBINED,
        (
            "{names} is part of a module whose experts are distributed: everything else in that module is whole on every rank"
        ),
        f"names a part of `{experts}`",
        "remove it",
    )


def _adapted(facts: Facts, name: str, assignment: Assignment) -> Reason | None:
    modules, prefix = facts.resolved.tree.modules, full_name(name, "")
    inside = [module for other, module in modules.items() if other == name or other.startswith(prefix)]
    if all(p.adapter is None for module in inside for p in module.parameters):
        return None
    return (
        COMBINED,
        "the experts of {names} have adapters, which are not distributed",
        "distributes them",
        "remove them",
    )


def _combined(facts: Facts) -> Iterator[Diagnostic]:
    resolved = facts.resolved
    section, compiled = resolved.data_parallel, resolved.compile
    if section is not None and resolved.dp_experts and not BACKENDS[section.backend].experts:
        able = [backend.name for backend in BACKENDS.values() if backend.experts]
        yield _error(
            COMBINED,
            f"the backend {section.backend} does not shard experts that are distributed over ep",
            field_label(section, "backend"),
            f"use {' or '.join(able)}",
        )
    around = {name for experts in resolved.dp_experts for name in (experts, *ancestors(experts))}
    broken = [name for name in resolved.compile_modules if name in around]
    if compiled is not None and compiled.fullgraph and broken:
        yield _error(
            COMBINED,
            f"{named(broken)} is compiled with `fullgraph`, but the graph breaks at its experts",
            field_label(compiled, "fullgraph"),
            "write `fullgraph: false` under `compile`",
            tuple(broken),
        )
