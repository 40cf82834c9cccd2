"""The last stage: lower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.plan import ResolvedPlan
from shardplan.lower import Program, lower

from .overrides import Logits, Override, switch, with_logits, with_regather
from .variants import On, Variants


def program_of(
    variants: Variants,
    on: On,
    *,
    logits: Logits = "plan",
    regather: bool | None = None,
    sections: Mapping[str, Override] | None = None,
) -> Program:
    """The program of one variant. With the overlay, the plan without it is needed too: for sequences that it does not split.

    Args:
        variants: without errors.

    Raises:
        ValueError: `logits` or `sections` ask for what the plan has not.
        TypeError: `regather` is no bool.
    """

    def finished(on: On) -> ResolvedPlan:
        resolved = variants.resolved[on]
        if on in variants.layouts:
            resolved = variants.layouts[on].onto(resolved)
        else:  # what is not seen to hold is not done
            resolved = replace(resolved, sums=tuple(one for one in resolved.sums if not one.rule.optional))
        return with_regather(with_logits(switch(resolved, sections or {}), logits), regather)

    return lower(finished(on), finished(False) if on else None)
