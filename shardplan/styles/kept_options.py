"""What a rule keeps of another rule for the same module: how its parameters are stored, and what its code counts by share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardplan.core.plan import Rule

from . import STYLES

KEPT = ("shares", "fused", "divides", "heads", "packed")


def with_kept(rule: Rule, other: Rule) -> Rule:
    """A rule with those options of another rule that its own style accepts; options that it states itself win."""
    style = STYLES[rule.style]
    kept: dict[str, Any] = {
        "shares": other.shares if style.features.means else tuple(replace(one, groups=None) for one in other.shares),
        "fused": other.fused,
        "divides": other.divides,
    }
    if style.heads_option:
        kept["heads"] = other.heads
    if style.packed_option:
        kept["packed"] = other.packed
    return replace(rule, **{name: value for name, value in kept.items() if name not in rule.stated})


def laid_over(rule: Rule, under: Rule) -> Rule:
    """A rule of an overlay with what it keeps of the rule under it."""
    return replace(with_kept(rule, under), under=under)
