"""Rules -> assignments: expanded, compared within a section, overridden across sections and plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.mesh import Axis
from shardplan.core.plan import Assignment, Overlays, PlanFile, Rule, Section, as_written, section_path, sections_of
from shardplan.core.tree import ModuleTree, ancestors, full_name, named
from shardplan.language.globs import parse_glob
from shardplan.language.plan_texts import value_text
from shardplan.styles import NONE, STYLES
from shardplan.styles.kept_options import laid_over

from .conditions import applies
from .dead import dead
from .matching import Names, Reached

BOTH = Code("SP202")
CONFLICT = Code("SP203")
TWICE = Code("SP204")


@dataclass(frozen=True, slots=True)
class Layer:
    """One section of one plan; later layers win.

    Args:
        rules: the rules that apply.
        reached: the names that each of them matches.
        keys: the keys of all rules.
    """

    plan: PlanFile
    section: Section
    rules: tuple[Rule, ...]
    reached: tuple[Reached, ...] = field(repr=False)
    keys: frozenset[str]


def layers(plan: PlanFile, names: Names, overlays: Overlays, axis: Axis = Axis.TP) -> tuple[Layer, ...]:
    """The sections that apply to an axis, overridden ones first. First is tensor_parallel, from the oldest ancestor
    to the plan itself; then each overlay, in the same order."""
    sections = [(file, section) for section in sections_of(overlays, axis) for file in plan.lineage]
    return tuple(_layer(file, section, rules, names) for file, section in sections if (rules := file.rules(section)))


def _layer(file: PlanFile, section: Section, rules: tuple[Rule, ...], names: Names) -> Layer:
    acting = tuple(rule for rule in rules if applies(rule))
    reached = tuple(names.reach_of(rule) for rule in acting)
    return Layer(file, section, acting, reached, frozenset(rule.pattern for rule in rules))


def assign(stack: tuple[Layer, ...], names: Names) -> dict[str, Assignment]:
    """The rule that applies to each module and parameter, in the tree's order."""
    winning: dict[str, Assignment] = {}
    under: dict[str, Assignment] = {}  # what a section overrides
    section: Section = "tensor_parallel"
    laid = cache(laid_over)  # one rule for each pair: findings tell them apart by it
    for layer in stack:
        if layer.section != section:
            section, under = layer.section, dict(winning)
        along = section_path(section)[-1] == "sequence_parallel"
        for name, (rule, is_parameter) in _winners(layer).items():
            below = under.get(name) if along and rule.style != NONE else None
            if below is not None and below.rule.style != NONE:
                rule = laid(rule, below.rule)
            winning[name] = Assignment(name, is_parameter, rule, layer.section)
    kept = {name: assignment for name, assignment in winning.items() if assignment.rule.style != NONE}
    kept = _with_whole_experts(kept, names.tree)
    return in_order(kept, names.tree)


def _with_whole_experts(assignments: dict[str, Assignment], tree: ModuleTree) -> dict[str, Assignment]:
    """Drop what other sections say about the inside of a module whose experts a rule distributes whole."""
    experts = {
        name: a.section
        for name, a in assignments.items()
        if not a.is_parameter and STYLES[a.rule.style].experts is not None
    }

    def stays(name: str, a: Assignment) -> bool:
        around = (tree.owner(name), *ancestors(name)) if a.is_parameter else ancestors(name)
        return all(experts.get(above, a.section) == a.section for above in around)

    return {name: a for name, a in assignments.items() if stays(name, a)} if experts else assignments


def in_order(assignments: Mapping[str, Assignment], tree: ModuleTree) -> dict[str, Assignment]:
    """The assignments in the tree's order, parameters after their modules."""
    return {name: assignments[name] for name in _in_order(assignments, tree)}


def _in_order(assignments: Mapping[str, Assignment], tree: ModuleTree) -> Iterator[str]:
    owners = {tree.owner(name) for name, assignment in assignments.items() if assignment.is_parameter}
    for module in tree.modules.values():
        if module.name in assignments:
            yield module.name
        if module.name in owners:
            names = (full_name(module.name, p.name) for p in module.parameters)
            yield from (name for name in names if name in assignments)


def _winners(layer: Layer) -> dict[str, tuple[Rule, bool]]:
    """The rule of one layer for each name; where several match, the last."""
    winners: dict[str, tuple[Rule, bool]] = {}
    for rule, reached in zip(layer.rules, layer.reached, strict=True):
        winners.update(dict.fromkeys(reached.modules, (rule, False)))
        if not reached.modules:  # a key that matches both is refused; it more likely means the modules
            winners.update(dict.fromkeys(reached.parameters, (rule, True)))
    return winners


def findings(plan: PlanFile, stack: tuple[Layer, ...], names: Names) -> Iterator[Diagnostic]:
    """The findings about the rules of each layer of a plan."""
    for i, layer in enumerate(stack):
        before = frozenset[str]().union(*(other.keys for other in stack[:i]))
        after = {rule.pattern for other in stack[i + 1 :] for rule in other.rules}
        for rule, reached in zip(layer.rules, layer.reached, strict=True):
            # A key that a later layer repeats, letter for letter, is judged there. `none` removes the inherited rule of
            # that key, whether or not it would have matched.
            restated = rule.pattern in after or (rule.style == NONE and rule.pattern in before)
            if not reached and not rule.optional and not restated:
                lenient = layer.plan.lenient_dead_rules
                inherited = layer.plan is not plan
                glob = parse_glob(rule.pattern)
                yield dead(names, glob, rule.location, lenient=lenient, inherited=inherited, having=rule.having)
            if reached.modules and reached.parameters:
                yield _both(rule, reached)
        yield from _clashes(layer)


def _both(rule: Rule, reached: Reached) -> Diagnostic:
    return Diagnostic(
        code=BOTH,
        severity=Severity.ERROR,
        message=f"`{rule.pattern}` matches modules and parameters, such as {reached.modules[0]} and "
        f"{reached.parameters[0]}",
        primary=Label(
            rule.location, f"matches {len(reached.modules)} modules and {len(reached.parameters)} parameters"
        ),
        help="write keys that match either the modules or the parameters",
        modules=(*reached.modules, *reached.parameters),
    )


def _clashes(layer: Layer) -> Iterator[Diagnostic]:
    """One finding for each pair of rules of one section that match the same names, unless the later one has `override`."""
    seen: dict[str, Rule] = {}
    meetings: dict[tuple[int, int], tuple[Rule, Rule, list[str]]] = {}
    for number, (rule, reached) in enumerate(zip(layer.rules, layer.reached, strict=True)):
        for name in reached.modules or reached.parameters:
            earlier = seen.get(name)
            if earlier is not None and not rule.override:
                key = (id(earlier), number)
                meetings.setdefault(key, (earlier, rule, []))[2].append(name)
            seen[name] = rule
    for earlier, later, names in meetings.values():
        yield _clash(earlier, later, tuple(names))


def _clash(earlier: Rule, later: Rule, names: tuple[str, ...]) -> Diagnostic:
    if later.style == earlier.style and later.options == earlier.options:
        return Diagnostic(
            code=TWICE,
            severity=Severity.WARNING,
            message=f"two rules declare the same for {named(names)}: `{earlier.pattern}` and `{later.pattern}`",
            primary=Label(later.location, f"declares `{later.style}` again"),
            related=(Label(earlier.location, f"declares `{earlier.style}`"),),
            help="remove one of them, or make the keys disjoint",
            modules=names,
        )
    return Diagnostic(
        code=CONFLICT,
        severity=Severity.ERROR,
        message=f"two rules for {named(names)} differ: {_difference(earlier, later)}",
        primary=Label(later.location, _written_as(later, earlier)),
        related=(Label(earlier.location, _written_as(earlier, later)),),
        help="make the keys disjoint, or write `override: true` in the later rule",
        modules=names,
    )


def _difference(earlier: Rule, later: Rule) -> str:
    if earlier.style != later.style:
        return f"`{earlier.style}` and `{later.style}`"
    return f"`{later.style}` with other options ({', '.join(_other_options(earlier, later))})"


def _other_options(one: Rule, other: Rule) -> Iterator[str]:
    return (name for name, value in one.options.items() if value != other.options[name])


def _written_as(rule: Rule, other: Rule) -> str:
    if rule.style != other.style:
        return f"declares `{rule.style}`"
    return "declares " + ", ".join(
        f"`{name}: {value_text(as_written(name, rule.options[name]))}`" for name in _other_options(rule, other)
    )
