"""Keyword arguments of `apply_plan` that override a plan's sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from shardplan.core.plan import Assignment, PlanFile, ResolvedPlan
from shardplan.styles import STYLES

Override = Mapping[str, Any] | Literal[False] | None
Logits = Literal["plan", "replicated", "sharded", "fused", "as_stored"]

HEADS = {"replicated": "colwise_gather_output", "sharded": "colwise_vocab", "fused": "colwise_fused"}


def overriding_document(overrides: Mapping[str, Override]) -> dict[str, Any] | None:
    """The given sections as the document of a child plan, which is read and checked as one; None if none is given.

    Raises:
        TypeError: a section is neither a mapping nor False nor None.
    """
    for name, value in overrides.items():
        if not (value is None or isinstance(value, Mapping) or (value is False and name != "pipeline_parallel")):
            off = "None" if name == "pipeline_parallel" else "False (without it) or None"
            raise TypeError(
                f"{name} must be a mapping (the plan's section; {{}} is its defaults) or {off}, not {value!r}"
            )
    given = {name: dict(value) for name, value in overrides.items() if isinstance(value, Mapping)}
    return {"version": "1", "name": "arguments", **given} if given else None


def with_parent(child: PlanFile, parent: PlanFile) -> PlanFile:
    """The child plan over a parent that was read earlier."""
    return replace(child, name=parent.name, models=parent.models, configurations=parent.configurations, parent=parent)


def switched_off(resolved: ResolvedPlan, overrides: Mapping[str, Override]) -> ResolvedPlan:
    """The plan without the sections that are False."""
    for name, value in overrides.items():
        if value is False:
            resolved = _off(resolved, name)
    return resolved


def refuse_empty(resolved: ResolvedPlan, overrides: Mapping[str, Override]) -> None:
    """Raise ValueError for a section that is given without modules, if the plan has no data-parallel units that it could mean."""
    for name in ("activation_checkpointing", "compile"):
        section = getattr(resolved, name)
        if isinstance(overrides.get(name), Mapping) and "modules" not in section.given and not resolved.dp_units:
            raise ValueError(
                f'{name} names no modules, and the plan has no data-parallel units: pass {name}={{"modules": [...]}}'
            )


def _off(resolved: ResolvedPlan, section: str) -> ResolvedPlan:
    if section == "data_parallel":
        return replace(resolved, data_parallel=None, dp_units=(), dp_parts=(), dp_experts=(), dp_ignored=frozenset())
    if section == "activation_checkpointing":
        return replace(resolved, activation_checkpointing=None, ac_modules=())
    if section == "separate_matrices":
        return replace(resolved, separate_matrices=None, matrices={})
    assert section == "compile", section
    return replace(resolved, compile=None, compile_modules=())


def with_regather(resolved: ResolvedPlan, regather: bool | None) -> ResolvedPlan:
    """Gather again in backward everything that is gathered along the sequence, or nothing of it; None leaves the plan's choice.

    Raises:
        TypeError: it is neither.
    """
    if regather is None:
        return resolved
    if not isinstance(regather, bool):
        raise TypeError(f"regather must be True, False or None, not {regather!r}")
    gathering = [a for a in resolved.assignments.values() if STYLES[a.rule.style].regather_option]
    changed = {a.name: replace(a, rule=replace(a.rule, regather=regather)) for a in gathering}
    return replace(resolved, assignments={**resolved.assignments, **changed})


def with_logits(resolved: ResolvedPlan, logits: Logits) -> ResolvedPlan:
    """Exchange the style of the output head, which is in no repeated block. "as_stored" is "sharded" where the plan
    has a head to exchange, and does nothing elsewhere.

    Raises:
        ValueError: an unknown word, or a plan without a head to exchange.
    """
    if logits == "plan":
        return resolved
    if logits not in (*HEADS, "as_stored"):
        raise ValueError(f'logits must be "plan", "replicated", "sharded", "fused" or "as_stored", not {logits!r}')
    found = [a for a in resolved.assignments.values() if a.rule.style in HEADS.values()]
    heads = [a for a in found if not any(part.isdigit() for part in a.name.split("."))]
    if not heads and (logits == "fused" or (logits == "sharded" and (resolved.sizes.tp or 1) > 1)):
        raise ValueError(
            f"logits={logits!r}: no module of the model has the style {', '.join(HEADS.values())} in plan {resolved.plan.name!r}: "
            f"write `lm_head: {HEADS[logits]}` under tensor_parallel, with the name of the output head"
        )
    style = HEADS.get(logits, HEADS["sharded"])
    changed: dict[str, Assignment] = {a.name: replace(a, rule=replace(a.rule, style=style)) for a in heads}
    return replace(resolved, assignments={**resolved.assignments, **changed})
