"""Two plans for one model: the rules that differ once they are bound, and the modules that are stored or run differently."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from shardplan.core.by_key import by_key
from shardplan.core.plan import Assignment, Overlays, ResolvedPlan, Variant, variant_name
from shardplan.core.plan_changes import Checkpoints, FieldChange, ModuleChange, RuleChange, Said
from shardplan.core.sections import DataParallel, Sections
from shardplan.core.tree import parent, starred
from shardplan.language.effective_rules import Value, field_changes
from shardplan.language.plan_texts import rule_text, section_fields
from shardplan.styles.backends import BACKENDS

if TYPE_CHECKING:
    from .lower import Program

_T = TypeVar("_T", bound=Hashable)
# Fields that name modules: they are compared as bound.
BOUND: Mapping[str, Callable[[ResolvedPlan], Iterable[str]]] = {
    "data_parallel.units": lambda plan: plan.fsdp_units,
    "data_parallel.ignored": lambda plan: sorted(plan.dp_ignored),
    "activation_checkpointing.modules": lambda plan: plan.ac_modules,
    "compile.modules": lambda plan: plan.compile_modules,
    "separate_matrices.parts": lambda plan: (name for name, one in plan.matrices.items() if one.by == "parts"),
    "separate_matrices.heads": lambda plan: (name for name, one in plan.matrices.items() if one.by == "heads"),
}


def rule_changes(old: ResolvedPlan, new: ResolvedPlan) -> tuple[RuleChange, ...]:
    """The modules and parameters of a variant for which two plans have different rules; equal changes are grouped."""
    before, after = old.assignments, new.assignments
    changes: dict[str, tuple[tuple[Said, ...], tuple[Said, ...]]] = {}
    for name in in_order({**before, **after}, old):
        pair = _said(before.get(name)), _said(after.get(name))
        if pair[0] != pair[1]:
            changes[name] = pair
    section = variant_name(old.overlays)
    return tuple(RuleChange(section, names, *pair) for pair, names in _grouped(changes).items())


def in_order(names: Iterable[str], plan: ResolvedPlan) -> list[str]:
    """Names of modules and parameters in the order of the model."""
    places = {name: i for i, name in enumerate(plan.tree.modules)}
    return sorted(names, key=lambda name: places.get(name, places.get(parent(name), 0)))


def _said(assignment: Assignment | None) -> tuple[Said, ...]:
    if assignment is None:
        return ()
    return (Said(rule_text(replace(assignment.rule, when=True)), assignment.rule.location),)


def module_changes(
    section: Variant, old: Mapping[str, tuple[str, ...]], new: Mapping[str, tuple[str, ...]]
) -> tuple[ModuleChange, ...]:
    """The modules that differ; those whose changes are equal, except for the numbers of layers, are grouped.

    Args:
        old, new: module -> facts (`module_facts`). Changes are in their order.
    """
    changes = {
        name: (old.get(name, ()), new.get(name, ())) for name in {**old, **new} if old.get(name) != new.get(name)
    }
    alike = {name: (starred(name), *(own_layer(name, side) for side in pair)) for name, pair in changes.items()}
    made = []
    for names in _grouped(alike).values():
        before, after = changes[names[0]]
        gone = tuple(line for line in before if line not in after)
        added = tuple(line for line in after if line not in before)
        made.append(ModuleChange(section, names, gone, added))
    return tuple(made)


def own_layer(name: str, facts: Iterable[str]) -> tuple[str, ...]:
    """The facts about a module, with the number of its own layer starred: equal layers then have equal facts."""
    parts, words = name.split("."), {}
    for i, part in enumerate(parts):
        if part.isdecimal():
            above = ".".join(parts[: i + 1])
            words[f"{above}."] = f"{starred(above)}."
    lines = tuple(facts)
    for word, star in reversed(words.items()):
        lines = tuple(line.replace(word, star) for line in lines)
    return lines


def module_facts(program: Program, overlays: Overlays | None = None) -> dict[str, tuple[str, ...]]:
    """What a program does at each module with the overlays, a line for each fact; modules without any are left out."""
    from .lower.describe import module_lines

    modules = program.variants[program.resolved.overlays if overlays is None else overlays]
    facts = {name: tuple(line.strip() for line in module_lines(module)) for name, module in modules.items()}
    return {name: (_style(head.partition(": ")[2]), *rest) for name, (head, *rest) in facts.items()}


def _style(text: str) -> str:
    return "no rule" if text == "-" else f"style {text}"


def program_changes(old: Program, new: Program) -> tuple[ModuleChange, ...]:
    """The modules that two programs of one variant store or run differently. What a program with sequence parallelism
    does with sequences that are not split is compared in the variant without it."""
    before, after = module_facts(old), module_facts(new)
    order = in_order({**before, **after}, old.resolved)
    sides = ({name: facts.get(name, ()) for name in order} for facts in (before, after))
    return module_changes(variant_name(old.resolved.overlays), *sides)


def section_changes(old: ResolvedPlan, new: ResolvedPlan) -> tuple[FieldChange, ...]:
    """The fields of sections that differ, and the modules that they name."""
    return field_changes(bound_fields(old), bound_fields(new))


def bound_fields(plan: ResolvedPlan) -> dict[str, Value]:
    """The fields of a plan's sections; for fields that name modules, the modules."""
    sections = Sections(
        data_parallel=plan.data_parallel,
        activation_checkpointing=plan.activation_checkpointing,
        compile=plan.compile,
        separate_matrices=plan.separate_matrices,
    )
    fields: dict[str, Value] = {name: text for name, text in section_fields(sections).items() if name not in BOUND}
    bound = {name: tuple(of(plan)) for name, of in BOUND.items()}
    return fields | {name: modules for name, modules in bound.items() if modules}


def checkpoints(old: ResolvedPlan, new: ResolvedPlan) -> Checkpoints:
    """Whether weights and training states saved with one plan can be read with the other. Both have the unsharded
    model's names and order whatever the plan is."""
    before, after = (_backend(plan.data_parallel) for plan in (old, new))
    if before == after or {before, after} <= _PORTABLE:
        return Checkpoints(True, True, "both have the unsharded model's names, shapes and order of rows")
    reason = f"training states of the backend {before} have not been read with {after}"
    return Checkpoints(True, False, reason)


def _backend(section: DataParallel | None) -> str:
    return section.backend if section is not None else "none"


_PORTABLE = {name for name, backend in BACKENDS.items() if backend.portable_states} | {"none"}


def _grouped(changes: Mapping[str, _T]) -> dict[_T, tuple[str, ...]]:
    groups = by_key((change, name) for name, change in changes.items())
    return {change: tuple(names) for change, names in groups.items()}
