"""The structural checks of a bound plan, which do not run the model. One rule per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.plan import ResolvedPlan
from shardplan.language.parse_findings import first_of

from . import (
    adapter_splits,
    async_tp_needs,
    backend,
    block_input_sources,
    checkpointed_modules,
    context_rules,
    declared,
    declared_heads,
    declared_stages,
    divisibility,
    exchanged_heads,
    expert_parallel,
    fsdp,
    half_covered,
    kinds,
    packed_weights,
    parameter_hooks,
    sequence,
    summed_outputs,
    tied_parameters,
    training_kernels,
    vocabulary_size,
)
from .facts import Facts

_RULES = (
    kinds,
    packed_weights,
    divisibility,
    declared,
    declared_heads,
    vocabulary_size,
    tied_parameters,
    half_covered,
    sequence,
    block_input_sources,
    context_rules,
    exchanged_heads,
    summed_outputs,
    fsdp,
    adapter_splits,
    backend,
    checkpointed_modules,
    async_tp_needs,
    expert_parallel,
    parameter_hooks,
    declared_stages,
    training_kernels,
)

CHECKS: tuple[Callable[[Facts], Iterator[Diagnostic]], ...] = tuple(rule.check for rule in _RULES)


def check(resolved: ResolvedPlan, *, seq_len: int | None = None) -> tuple[Diagnostic, ...]:
    """All structural findings of a bound plan.

    Args:
        resolved: the plan, the model's tree and the sizes of the mesh. With `sizes.tp` None, checks that depend on the
            size run at the smallest size above 1 that the model allows.
        seq_len: the sequence length in tokens, if it is known.
    """
    facts = Facts(resolved, seq_len)
    found = tuple(finding for rule in CHECKS for finding in rule(facts))
    return first_of(found, "plan") if any(one.is_error for one in found) else found


def allowed_tp(resolved: ResolvedPlan) -> tuple[int, ...]:
    """The tp sizes that the model allows with this plan, ascending.

    1 is always among them, and the only one if the plan splits nothing. If only a vocabulary limits the size, powers of
    two are listed.
    """
    return Facts(resolved).allowed


__all__ = ["CHECKS", "allowed_tp", "check"]
