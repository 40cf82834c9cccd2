"""Hooks on parameters that other parameters will take the place of."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import named
from shardplan.styles.backends import BACKENDS

from .facts import Facts

HOOKED = Code(
    code="SP525",
    title="a hook on a parameter that is replaced",
    text="""`register_hook` and `register_post_accumulate_grad_hook` belong to one Parameter object. Tensor parallelism
and FSDP2 put DTensors in its place, and the hook would never be called: a clipped, scaled or frozen gradient would no
longer be so, without a word. Register the hooks on the parameters that the model has after `apply_plan`; there they get
this rank's DTensor. Where a parameter stays (tp=1 without FSDP), its hooks stay too.""",
)

CODES = (HOOKED,)


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the model."""
    if replaces(facts.resolved):
        yield from hooked(facts.resolved)


def replaces(resolved: ResolvedPlan) -> bool:
    """Whether applying the plan puts other parameters in the place of the model's."""
    sizes, section = resolved.sizes, resolved.data_parallel
    if sizes.tp != 1:  # not said: it may be any
        return True
    ranks = sizes.dp_replicate * sizes.dp_shard * sizes.cp
    return section is not None and ranks > 1 and BACKENDS[section.backend].shards


def hooked(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    """The finding about parameters with hooks, where there are any."""
    names = tuple(name for name, (_, parameter) in resolved.tree.parameters.items() if parameter.hooked)
    if names:
        yield Diagnostic(
            code=HOOKED.code,
            severity=Severity.ERROR,
            message=f"hooks are registered on {named(names)}, and applying the plan replaces these parameters: the hooks "
            "would never be called",
            help="register them after apply_plan, on the parameters that the model has then",
            modules=names,
        )
