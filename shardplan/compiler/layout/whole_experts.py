"""Experts that are distributed whole: whether a module of experts can run on other tokens than those of its call: on each token by itself, and with some of the
token's experts at a time. Its call in the unsharded run is repeated the way the ranks of the axis ep make it together. And stacks of experts that code outside of their module reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.tree import ancestors, named
from shardplan.model.model_findings import reason
from shardplan.model.rebinding import copied
from shardplan.model.reduced.trace import Event
from shardplan.styles.bound import bound_modules

from .finding import Finding, Operand
from .layout_diagnostics import diagnostic
from .rank_experts import NO_ROLES, distribute_experts, in_rows, of_dims, roles
from .run import RecordedModel
from .spread import chunk, same

TOKENS = Code("SP413")


def token_findings(plan: ResolvedPlan, recorded_models: Iterable[RecordedModel], ranks: int) -> tuple[Diagnostic, ...]:
    """One finding for each rule and reason, in the names of the reduced model.

    Args:
        plan: the plan, bound to the reduced model.
        ranks: the number of ranks that share the experts.
    """
    distributed = {name: one.experts.count for name, one in bound_modules(plan).items() if one.experts is not None}
    reasons = (
        ((plan.modules[name].rule, why), name)
        for recorded in recorded_models
        for name, why in _reasons(recorded, distributed, ranks)
        if why
    )
    return tuple(_finding(rule, why, tuple(dict.fromkeys(names))) for (rule, why), names in by_key(reasons).items())


def _reasons(recorded: RecordedModel, distributed: Mapping[str, int], ranks: int) -> Iterator[tuple[str, str]]:
    """Each call of a module of experts, with the reason; both are remembered for other variants of a plan."""
    for event in recorded.reference.events:
        if event.kind == "enter" and event.module in distributed:
            count, result = distributed[event.module], recorded.reference.result(event.module, event.place[1])
            if (call := (event.place, count, ranks)) not in recorded.token_wise:
                module = recorded.model.get_submodule(event.module)
                recorded.token_wise[call] = _reason(recorded, module, event, result, count, ranks)
            yield event.module, recorded.token_wise[call]


def _reason(
    recorded: RecordedModel, module: nn.Module, event: Event, result: Tensor | None, count: int, ranks: int
) -> str:
    """Why several ranks cannot make the call together; "" where they can."""
    found = roles(recorded.reference.values[number] for number in event.inputs)
    if found is None:
        return NO_ROLES
    dims, shape = found[0].ndim, found[0].shape
    tokens, ids, weights = (value.detach() for value in in_rows(found))
    if int(ids.max()) >= count or int(ids.min()) < 0:
        return f"its call has expert ids outside of 0 to {count - 1}, the experts of its stacks"
    if result is None or result.shape != shape:
        return "it does not return one result for each token"
    together = torch.zeros_like(tokens)
    with torch.no_grad():
        for rank in range(ranks):
            own = _of_rank(module, count, ranks, rank)
            for part in range(ranks):
                start, length = chunk(len(tokens), ranks, part)
                rows = slice(start, start + length)
                try:
                    part_of = (of_dims(one[rows], dims) for one in (tokens, ids, weights))
                    together[rows] += own(*part_of).reshape(tokens[rows].shape)
                except Exception as error:  # raised by the module's own code
                    return f"it raises {reason(error)} when its parameters are a rank's part of dim 0"
    if same(together.reshape(shape), result.detach(), recorded.reference.rounding[event.inputs[0]]):
        return ""
    return "its result for a token is not the sum of what the token's experts return for it"


def _of_rank(module: nn.Module, count: int, ranks: int, rank: int) -> nn.Module:
    own = copied(module, {})
    first, length = chunk(count, ranks, rank)
    for name, parameter in own._parameters.items():
        if parameter is not None:
            own._parameters[name] = nn.Parameter(parameter.detach()[first : first + length], requires_grad=False)
    distribute_experts(own, count, ranks, rank)
    return own


def _finding(rule: Rule, why: str, names: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code=TOKENS,
        severity=Severity.ERROR,
        message=f"the experts of {named(names)} cannot be distributed: {why}",
        primary=Label(rule.location, "distributes them"),
        help="remove the rule: tensor parallelism splits the stacks of experts",
        modules=names,
    )


# Stacks that code outside of their module reads. They are DTensors there, also at tp 1, where no run of a rank is typed.
def outside_findings(plan: ResolvedPlan, recorded_models: Iterable[RecordedModel]) -> tuple[Diagnostic, ...]:
    """One finding for each pair of a place in the code and a parameter, in the names of the reduced model.

    Args:
        plan: the plan, bound to the reduced model.
    """
    distributed = {name for name, one in bound_modules(plan).items() if one.experts is not None}
    found: dict[tuple[str, str], dict[str, Finding]] = {}
    for recorded in recorded_models:
        for event in recorded.reference.events:
            for number in event.inputs if event.kind == "op" else ():
                if (owner := _stack_outside(plan, recorded, event, number, distributed)) is not None:
                    one = _read_outside(recorded, event, number, owner)
                    place = plan.tree.pattern(one.module), plan.tree.pattern(one.subject)
                    found.setdefault(place, {}).setdefault(one.subject, one)
    return tuple(
        diagnostic(plan, tuple(layers.values()), None, plan.modules[next(iter(layers.values())).operands[0].maker])
        for layers in found.values()
    )


def _stack_outside(
    plan: ResolvedPlan, recorded: RecordedModel, event: Event, number: int, distributed: set[str]
) -> str | None:
    """The module of experts that has a value as a parameter, if code outside of this module reads it."""
    name = recorded.reference.parameters.get(number)
    if name is None:
        return None
    module, _ = plan.tree.parameters[name]
    owner = next((one for one in (module.name, *ancestors(module.name)) if one in distributed), None)
    return None if owner in (None, event.module, *ancestors(event.module)) else owner


def _read_outside(recorded: RecordedModel, event: Event, number: int, owner: str) -> Finding:
    run = recorded.reference
    name, shape, trained = run.parameters[number], tuple(run.values[number].shape), run.requires_grad[number]
    operand = Operand(number, name, owner, shape, "I" if trained else "whole", trained)
    return Finding("outside", event.module, name, event.name, event.source, (operand,))
