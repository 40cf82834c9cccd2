"""The last stage: lower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.plan import Overlays, ResolvedPlan, without_sequence

from .lower import Program, lower
from .overrides import Logits, Override, switched_off, with_logits, with_regather
from .variants import Variants


def program_of(
    variants: Variants,
    overlays: Overlays,
    *,
    logits: Logits = "plan",
    regather: bool | None = None,
    sections: Mapping[str, Override] | None = None,
) -> Program:
    """The program of one variant. Sequence parallelism needs the variant without it too, for sequences that it does not split.

    Args:
        variants: variants without errors.

    Raises:
        ValueError: `logits` or `sections` ask for something that the plan lacks.
        TypeError: `regather` is not a bool.
    """

    def finished(overlays: Overlays) -> ResolvedPlan:
        resolved = variants.resolved[overlays]
        if overlays in variants.layouts:
            resolved = variants.layouts[overlays].onto(resolved)
        else:  # no run has shown these sums to be right
            resolved = replace(resolved, sums=tuple(one for one in resolved.sums if not one.rule.optional))
        return with_regather(with_logits(switched_off(resolved, sections or {}), logits), regather)

    base = without_sequence(overlays)
    return lower(finished(overlays), *([finished(base)] if overlays != base else []))
