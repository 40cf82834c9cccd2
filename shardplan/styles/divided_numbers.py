"""The numbers of a module that its code reshapes with: each is divided, by tp or as key-value heads are."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.plan import Assignment, ResolvedPlan
from shardplan.core.tree import ModuleInfo, full_name, is_count, parent

from . import STYLES
from .head_counts import GROUPS, HEAD_SIZES
from .stored_parameters import counts_of_heads, lower_parameters

CONFIG = "config."


def attribute(resolved: ResolvedPlan, assignment: Assignment, path: str) -> int | str | None:
    """The number that a `divide` path names on the module, or why there is none.

    None where only a nested config, of which it is unknown whether it is this module's, has it in several
    values.
    """
    tree = resolved.tree
    owner = tree.modules[tree.owner(assignment.name) if assignment.is_parameter else assignment.name]
    if path.startswith(CONFIG):
        name = path.removeprefix(CONFIG)
        if owner.config is not None:
            found = {owner.config[name]} if name in owner.config else set()
        else:
            found = {tree.numbers[name]} if name in tree.numbers else _nested(tree.numbers, name)
        if len(found) > 1:
            return None
        value = next(iter(found), None)
        where = "the configuration" if owner.config != {} else f"{owner.class_name}, which has no configuration,"
    else:
        name = path
        value = owner.numbers.get(name)
        where = owner.class_name
    if value is None:
        return f"{where} has no number {name}"
    if isinstance(value, bool) or not float(value).is_integer() or value < 1:
        return f"{name} of {where} is {value}, not a count"
    return int(value)


def _nested(numbers: Mapping[str, int | float], name: str) -> set[int | float]:
    return {value for key, value in numbers.items() if key.endswith(f".{name}")}


def divided(plan: ResolvedPlan, module: ModuleInfo, shared: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Attributes of a module, and by what each is divided: those that its rule names by tp. Where r ranks compute with one
    key-value head, the number of key-value heads is divided by tp / r, and that of query heads for each by r.

    Args:
        shared: `shared_heads` of the plan.
    """
    ranks = plan.sizes.tp or 1
    assignment = plan.modules.get(module.name)
    names = assignment.rule.divide if assignment is not None else ()
    copies = shared.get(module.name, 1)
    by = dict.fromkeys(names, ranks)
    if copies == 1:
        return tuple(by.items())
    for name in names:
        assert assignment is not None
        if attribute(plan, assignment, name) == ranks // copies:
            by[name] = ranks // copies
    groups = module.numbers.get(GROUPS)
    if is_count(groups) and groups > 1:
        by[GROUPS] = copies
    return tuple(by.items())


def shared_heads(plan: ResolvedPlan) -> Mapping[str, int]:
    """On how many ranks each key-value head of an attention module is, where it is on several; also of modules that have no keys
    of their own and read those of another module of their class."""
    ranks, tree = plan.sizes.tp or 1, plan.tree
    found: dict[str, int] = {}
    for name, module in tree.modules.items():
        around = parent(name)
        if not any(size in tree.modules[around].numbers for size in HEAD_SIZES):
            continue
        for parameter in lower_parameters(plan, module):
            rule = plan.parameters.get(full_name(name, parameter.name)) or plan.modules.get(name)
            if (
                parameter.shared and rule is not None and STYLES[rule.rule.style].shards_parameters
            ):  # not gathered by its style
                found[around] = max(found.get(around, 1), *(number for _, number in parameter.pieces(ranks, 0)))
    classes = {tree.modules[name].class_name for name in found}
    for name, module in tree.modules.items():
        groups = module.numbers.get(GROUPS)
        if name in found or module.class_name not in classes or not is_count(groups):
            continue
        heads = counts_of_heads(plan, name)
        count = max(heads, default=0) // groups
        if len(set(heads)) == 1 and 0 < count < ranks and ranks % count == 0:
            found[name] = ranks // count
    return found
