"""The rules for the axis cp that follow from the built-in plan of one model type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import shardplan
from shardplan.authoring.context_section import NoSection, context_section
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.bind import decided
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.model import FoundModel, find_any
from tests.model_settings import without_dropout

from .entry import SIZE_CODES, Entry
from .experts import config_of

MESHES = ({"cp": 2, "tp": 1}, {"cp": 2, "tp": 2})
WORDS = {"exchange_heads": "heads", "replicate_seq": "whole"}
OF_CP = "SP369"  # a size that the heads of the default configuration do not allow


def with_context(before: Entry) -> Entry:
    """The entry of a type with what was found out about its plan on the axis cp."""
    torch.set_num_threads(1)
    if before.plan is None:
        return replace(before, context={}, mixers={})
    config = without_dropout(config_of(before.name))
    try:
        found = find_any(config)
        section = derived(found)
    except PlanError as error:
        return replace(before, context={"section": _said(error.diagnostics[0])}, mixers={})
    if isinstance(section, NoSection):
        why = _said(section.findings[0]) if section.findings else section.reason
        return replace(before, context={"section": why}, mixers={})
    plan = {"version": "1", "name": before.name, "extends": before.plan, "context_parallel": section}
    said = {" ".join(f"{axis} {n}" for axis, n in mesh.items()): judged(config, plan, mesh) for mesh in MESHES}
    return replace(before, context=said, mixers=mixers(section))


def derived(found: FoundModel) -> Any:
    """The section, or why there is none."""
    plan = auto_plan(found.tree).plan
    assert plan is not None
    return context_section(found, decided(plan, found.tree)[0])


def judged(config: Any, plan: dict[str, Any], mesh: dict[str, int]) -> str:
    """ "right", "size SPnnn", or what is wrong."""
    report = shardplan.validate(config, plan, mesh, sequence_parallel=True if mesh["tp"] > 1 else None)
    if report.ok:
        return "right" if report.proof is not None and report.proof.ok else "nothing was compared"
    errors = [d for d in report.diagnostics if d.is_error]
    size = next((d.code for d in errors if d.code in (*SIZE_CODES, OF_CP)), None)
    return f"size {size}" if size is not None else _said(errors[0])


def mixers(section: dict[str, Any]) -> dict[str, str]:
    """What mixes tokens -> "heads" or "whole"."""
    styles = {key: rule if isinstance(rule, str) else rule["style"] for key, rule in section.items()}
    return {key.split("*.", 1)[-1]: WORDS[style] for key, style in styles.items() if style in WORDS}


def cell(e: Entry) -> str:
    """What the table says of a type."""
    if not e.context:
        return "not run"
    if wrong := [f"{mesh}: {text}" for mesh, text in e.context.items() if not fits(text)]:
        return wrong[0].replace("|", "\\|")[:160]
    ways = ", ".join(f"`{part}` {way}" for part, way in e.mixers.items())
    sizes = [f"{mesh}: {text}" for mesh, text in e.context.items() if text != "right"]
    return "; ".join([ways or "all token by token", *sizes])


def proven(e: Entry) -> bool:
    """Whether the type is right on a mesh with cp, and wrong on none."""
    return "right" in e.context.values() and all(map(fits, e.context.values()))


def fits(text: str) -> bool:
    return text == "right" or text.startswith("size ")


def _said(d: Diagnostic) -> str:
    return " ".join(": ".join((d.code, d.message, *d.notes[:1])).split())
