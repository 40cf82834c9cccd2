"""Hooks on parameters that applying the plan replaces, or that several pipeline stages have copies of."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors
from shardplan.styles.backends import BACKENDS

from .facts import Facts

HOOKED = Code("SP525")
AFTER_STEP = "remove them, and change `.grad` between the pipeline's step and optimizer.step()"


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the model."""
    resolved = facts.resolved
    if replaces(resolved):
        yield from hooked(resolved)
    elif resolved.sizes.pp > 1:
        yield from _of_copies(resolved)


def replaces(resolved: ResolvedPlan) -> bool:
    """Whether applying the plan replaces the model's parameters."""
    sizes, section = resolved.sizes, resolved.data_parallel
    if sizes.tp != 1:  # None: it may be any size
        return True
    return section is not None and sizes.data_parallel_ranks > 1 and BACKENDS[section.backend].shards


def hooked(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    """The finding about parameters with hooks, if any."""
    names = tuple(name for name, (_, parameter) in resolved.tree.parameters.items() if parameter.hooked)
    if names:
        yield Diagnostic(
            code=HOOKED,
            severity=Severity.ERROR,
            message=f"hooks are registered on {resolved.tree.named(names)}: applying the plan replaces these parameters, so the hooks would "
            "never run",
            help=(
                "register them after apply_plan, on the parameters that the model has then; under FSDP2 use "
                "register_post_accumulate_grad_hook"
            ),
            modules=names,
        )


def _of_copies(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    """The finding about tied parameters with hooks whose names are not all in one block."""
    tree, blocks = resolved.tree, frozenset(resolved.pp_blocks)
    homes = {name: next((one for one in ancestors(name) if one in blocks), name) for tie in tree.tied for name in tie}
    apart = {name for tie in tree.tied if len({homes[name] for name in tie}) > 1 for name in tie}
    names = tuple(name for name, (_, parameter) in tree.parameters.items() if parameter.hooked and name in apart)
    if names:
        yield Diagnostic(
            code=HOOKED,
            severity=Severity.ERROR,
            message=f"hooks are registered on {tree.named(names)}, and several pipeline stages have a copy: each hook would see a part of "
            "the gradient",
            help=AFTER_STEP,
            modules=names,
        )
