"""Hooks on parameters that applying the plan replaces."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.styles.backends import BACKENDS

from .facts import Facts

HOOKED = Code("SP525")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the model."""
    if replaces(facts.resolved):
        yield from hooked(facts.resolved)


def replaces(resolved: ResolvedPlan) -> bool:
    """Whether applying the plan puts other parameters in the place of the model's."""
    sizes, section = resolved.sizes, resolved.data_parallel
    if sizes.tp != 1:  # None: it may be any size
        return True
    return section is not None and sizes.data_parallel_ranks > 1 and BACKENDS[section.backend].shards


def hooked(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    """The finding about parameters with hooks, where there are any."""
    names = tuple(name for name, (_, parameter) in resolved.tree.parameters.items() if parameter.hooked)
    if names:
        yield Diagnostic(
            code=HOOKED,
            severity=Severity.ERROR,
            message=f"hooks are registered on {resolved.tree.named(names)}, but applying the plan replaces these parameters: the hooks "
            "would never run",
            help="register them after apply_plan, on the parameters that the model has then: register_post_accumulate_grad_hook under FSDP2",
            modules=names,
        )
