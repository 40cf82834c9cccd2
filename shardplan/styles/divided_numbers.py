"""The numbers with which a module's code reshapes; each is divided by tp, or as key-value heads are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from shardplan.core.expressions import evaluate, parse_expression
from shardplan.core.module_program import ParameterProgram
from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.core.tree import ModuleInfo, full_name, is_count, parent

from . import STYLES
from .head_counts import GROUPS, HEAD_SIZES, number_or_none
from .stored_parameters import counts_of_heads, lower_parameters

CONFIG = "config."


def attribute(resolved: ResolvedPlan, assignment: Assignment, path: str) -> int | str | None:
    """The number of the module that an even share names, or the reason why there is none.

    None if only a nested config has it, with several values: it is unknown whether such a config is this module's.
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
    """Attributes of a module, and the divisor of each: tp for those that its rule names. The length of a group of a norm's
    features is divided by the number of ranks that share it, the number of groups by the rest of tp. Where r ranks compute
    with one key-value head, the number of key-value heads is divided by tp / r, and the number of query heads for each by r.

    Args:
        shared: `shared_heads` of the plan.
    """
    ranks = plan.sizes.tp or 1
    assignment = plan.modules.get(module.name)
    names = assignment.rule.divided if assignment is not None else ()
    if assignment is not None and assignment.rule.groups is not None:
        over = mean_ranks(plan, assignment.rule)
        by_what = {"length": over, "groups": ranks // over, None: ranks}
        return tuple((name, by_what[group_number(plan, assignment, name)]) for name in names)
    copies = shared.get(module.name, 1)
    by = dict.fromkeys(names, ranks)
    if copies == 1:
        return tuple(by.items())
    for name in names:
        assert assignment is not None
        if attribute(plan, assignment, name) == ranks // copies:
            by[name] = ranks // copies
    groups = module.numbers.get(GROUPS)
    if is_count(groups) and groups % copies == 0:  # else queries are split differently, which the layout check finds
        by[GROUPS] = copies
    return tuple(by.items())


def mean_ranks(plan: ResolvedPlan, rule: Rule) -> int:
    """The number of neighbouring ranks over which the features of one mean are split."""
    ranks = plan.sizes.tp or 1
    groups = evaluate(parse_expression(rule.groups), plan.tree.numbers) if rule.groups is not None else 1
    return max(1, ranks // groups)


def group_length(plan: ResolvedPlan, module: ModuleInfo, rule: Rule) -> int | None:
    """The number of features in one group of a norm; None if its rule has no groups, or their number has no value."""
    groups = number_or_none(rule.groups, plan.tree.numbers) if rule.groups is not None else None
    return module.parameters[0].shape[-1] // groups if groups is not None and module.parameters else None


def group_number(plan: ResolvedPlan, assignment: Assignment, name: str) -> Literal["length", "groups"] | None:
    """What a norm's number counts: the features of one group of its rule ("length"), or the groups; None if neither."""
    module = plan.tree.modules.get(assignment.name)
    groups = next((one.groups for one in assignment.rule.shares if one.name == name), None)
    if module is None or groups is None:
        return None
    number = attribute(plan, assignment, name)
    if number == group_length(plan, module, assignment.rule):
        return "length"
    return "groups" if number == number_or_none(groups, plan.tree.numbers) else None


def settings(
    plan: ResolvedPlan, module: ModuleInfo, parameters: Sequence[ParameterProgram], divide: Iterable[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Attributes of a module, and the value of each on a rank: those in its rule, and `groups` of a depthwise
    convolution, which is the rank's number of channels.

    Args:
        parameters: the module's, as stored.
        divide: what `divided` returns for it.
    """
    assignment = plan.modules.get(module.name)
    found: dict[str, int] = {}
    if module.kind == "depthwise":
        weight = next(p for p in parameters if p.name == "weight")
        if weight.dim is not None:
            whole, ranks = module.parameter("weight"), plan.sizes.tp or 1
            assert whole is not None, module
            shard = whole.shape[weight.dim] // ranks
            found["groups"] = sum(length * copies for length, copies in weight.pieces(ranks, shard))
    values = [(one.name, one.value) for one in assignment.rule.shares if one.value] if assignment is not None else []
    if values:
        numbers = dict(module.numbers)
        numbers |= {name: int(numbers[name]) // by for name, by in divide if name in numbers}
        for name, expression in values:
            numbers[name] = found[name] = evaluate(parse_expression(expression), numbers)
    return tuple(found.items())


def shared_heads(plan: ResolvedPlan) -> Mapping[str, int]:
    """The number of ranks that have each key-value head of an attention module, if several do; also for modules that
    read the keys of another module of their class."""
    ranks, tree = plan.sizes.tp or 1, plan.tree
    found: dict[str, int] = {}
    for name, module in tree.modules.items():
        around = parent(name)
        has_heads = any(size in tree.modules[around].numbers for size in HEAD_SIZES)
        for parameter in lower_parameters(plan, module):
            rule = plan.parameters.get(full_name(name, parameter.name)) or plan.modules.get(name)
            if rule is None or not (has_heads or rule.rule.heads):
                continue
            if parameter.shared and STYLES[rule.rule.style].shards_parameters:  # not gathered by its style
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
