"""Adapters of split layers are split with their layer, or refused."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import Rule
from shardplan.core.tree import ModuleInfo, ParameterInfo, full_name
from shardplan.styles.adapter_styles import adapter_style

from .facts import Facts

ADAPTER = Code("SP390")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule and reason."""
    if facts.tp in (None, 1):
        return
    reasons = (
        (_reason(facts, module, parameter), module.name)
        for module in facts.resolved.tree.modules.values()
        for parameter in module.parameters
        if parameter.adapter is not None
    )
    for (rule, what, help), names in by_key(one for one in reasons if one[0][1]).items():
        adapted = tuple(dict.fromkeys(names))
        yield Diagnostic(
            code=ADAPTER,
            severity=Severity.ERROR,
            message=f"{what} {facts.resolved.tree.named(map(facts.resolved.tree.address, adapted))}",
            primary=Label(rule.location, f"`{rule.style}` splits the layer") if rule is not None else None,
            help=help,
            modules=adapted,
        )


def _reason(facts: Facts, module: ModuleInfo, parameter: ParameterInfo) -> tuple[Rule | None, str, str]:
    """The rule that splits the layer, the problem and the remedy; no words if there is no problem."""
    whole = "leave these layers out of the adapter"
    if parameter.adapter == "parameter":
        return (
            None,
            "no plan can shard parameters that an adapter replaces one by one (`target_parameters`), such as those of",
            "adapt Linear modules (`target_modules`)",
        )
    resolved = facts.resolved
    for own in module.parameters:
        assignment = resolved.parameters.get(full_name(module.name, own.name))
        if assignment is not None and facts.style(assignment).shards_parameters:
            return (
                assignment.rule,
                "a rule for a single parameter splits the adapted layer",
                "write the rule for the module",
            )
    assignment = resolved.modules.get(module.name)
    if assignment is None or facts.style(assignment).is_block_input:
        return None, "", ""
    if adapter_style(facts.style(assignment), parameter) is not None:
        return None, "", ""
    if parameter.adapter == "magnitude":
        return (
            assignment.rule,
            "DoRA needs the norm of whole rows of the weight of",
            f"{whole}, or set `use_dora=False`",
        )
    return assignment.rule, f"the adapter's {parameter.name} cannot be split with the weight of", whole
