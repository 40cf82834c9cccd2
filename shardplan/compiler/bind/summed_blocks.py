"""`sum_outputs`: the blocks that have it, and the modules that it names in each block."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Overlays, PlanFile, sections_of
from shardplan.core.suggest import closest
from shardplan.core.sum_outputs import SummedOutputs, SumRule
from shardplan.core.tree import ModuleTree, named, starred
from shardplan.language.globs import parse_glob

from .conditions import applies
from .dead import dead
from .matching import Names

SUMMED = Code("SP208")


def declared_sums(
    plan: PlanFile, tree: ModuleTree, names: Names, overlays: Overlays
) -> tuple[tuple[SummedOutputs, ...], tuple[Diagnostic, ...]]:
    """The sums of each block, in the tree's order, and the findings about them.

    The lists of a child plan and of the overlays replace earlier lists for the same block; a rule without
    a list changes nothing.
    """
    rules = [
        (file, rule)
        for section in sections_of(overlays)
        for file in plan.lineage
        for rule in file.sums.get(section, ())
        if applies(rule)
    ]
    in_force: dict[str, SumRule] = {}
    wrong: list[Diagnostic] = []
    for file, rule in rules:
        reached = names.reach_of(rule)
        if not reached.modules and not rule.styled and not rule.optional:
            glob, inherited = parse_glob(rule.pattern), file is not plan
            wrong.append(dead(names, glob, rule.location, inherited=inherited, modules_only=True, having=rule.having))
        in_force.update(dict.fromkeys(reached.modules, rule))
    found: list[SummedOutputs] = []
    used: set[str] = set()
    summing = (name for name in tree.modules if name in in_force and in_force[name].outputs)
    matched = ((in_force[name], (name, _members(tree, name, in_force[name]))) for name in summing)
    for rule, blocks in by_key(matched).items():
        wrong += [] if rule.optional else _unmatched(tree, rule, dict(blocks))
        for name, lists in blocks:
            members = tuple(dict.fromkeys(member for each in lists for member in each))
            if len(members) < 2:
                continue
            if twice := used.intersection(members):
                wrong.append(
                    _finding(rule, f"{named(sorted(twice))} is in two sums", "name it in one of them", members)
                )
                continue
            used.update(members)
            found.append(SummedOutputs(name, members, rule))
    order = {name: i for i, name in enumerate(tree.modules)}
    return tuple(sorted(found, key=lambda one: order[one.block])), tuple(wrong)


def _members(tree: ModuleTree, block: str, rule: SumRule) -> tuple[tuple[str, ...], ...]:
    """The modules that each of a rule's patterns matches below a block."""
    prefix = f"{block}." if block else ""
    below = [name for name in tree.modules if name and name.startswith(prefix) and name != block]
    globs = [parse_glob(pattern) for pattern in rule.outputs]
    return tuple(tuple(name for name in below if glob.matches(name.removeprefix(prefix))) for glob in globs)


def _unmatched(tree: ModuleTree, rule: SumRule, blocks: Mapping[str, tuple[tuple[str, ...], ...]]) -> list[Diagnostic]:
    """Findings about patterns that match in no block; if there are none, about a rule that finds two modules in no block."""
    missing = [p for i, p in enumerate(rule.outputs) if not any(lists[i] for lists in blocks.values())]
    if not missing:
        if any(len({name for each in lists for name in each}) > 1 for lists in blocks.values()):
            return []
        only = next(name for lists in blocks.values() for each in lists for name in each)
        message = f"`{rule.text}` matches {starred(only)} alone: nothing is added to it"
        return [_finding(rule, message, "name all modules whose outputs the block adds up", tuple(blocks))]
    first = next(iter(blocks))
    prefix = f"{first}." if first else ""
    below = [name.removeprefix(prefix) for name in tree.modules if name.startswith(prefix) and name not in ("", first)]
    found = []
    for pattern in missing:
        near = closest(pattern, below, cutoff=0.6)
        help = f"write `{near}`" if near else "name modules relative to the block, such as `self_attn.o_proj`"
        found.append(_finding(rule, f"`{pattern}` in `sum_outputs` matches no module of {starred(first)}", help, ()))
    return found


def _finding(rule: SumRule, message: str, help: str, modules: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code=SUMMED,
        severity=Severity.ERROR,
        message=message,
        primary=Label(rule.location, "declares a sum"),
        help=help,
        modules=modules,
    )
