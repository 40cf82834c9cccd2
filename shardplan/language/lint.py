"""The errors of a plan that need no model: rules that contradict or repeat each other, empty parts.

Two patterns are compared by their alternatives, not by the names they match: those depend on the model.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardplan.core.diagnostics import Code, Label, Location, Severity
from shardplan.core.plan import SECTIONS, PlanFile, Rule, section_path
from shardplan.core.sources import SourceMap

from .globs import parse_glob
from .inherit import effective_sections
from .parse_findings import Findings, quoted
from .parsing import Parsed, parse_plan

CONTRADICTION = Code("SP116")
NO_EFFECT = Code("SP117")
EMPTY_PART = Code("SP118")


def lint_plan(source: str | os.PathLike[str] | Mapping[str, Any], *, name: str | None = None) -> Parsed:
    """Reads a plan as `parse_plan` does, and adds the findings that need no model.

    Raises:
        TypeError: as `parse_plan`.
    """
    return lint_parsed(parse_plan(source, name=name))


def lint_parsed(parsed: Parsed) -> Parsed:
    """A plan that was read, with the findings that need no model."""
    if parsed.plan is None:
        return parsed
    findings = Findings(parsed.plan.file)
    for section in SECTIONS:
        _check_section(parsed.plan.rules(section), findings)
    _check_emptiness(parsed.plan, parsed.sources, findings)
    return replace(parsed, diagnostics=parsed.diagnostics + findings.all)


def _check_section(rules: tuple[Rule, ...], findings: Findings) -> None:
    """Checks the rules of one section against each other, in time linear in the alternatives of their patterns. For
    rules with different conditions it is unknown whether both apply.
    """
    holders: dict[str, list[Rule]] = defaultdict(list)  # rules of one text have different conditions
    left: dict[Location, int] = {}  # place of a rule -> its alternatives that no later rule has taken
    for position, rule in enumerate(rules):
        texts = parse_glob(rule.pattern).texts
        left[rule.location] = len(texts)
        if rule.override and position == 0:
            path = (*rule.location.path, "override")
            findings.add(
                NO_EFFECT,
                "`override` has no effect on the first rule of a section",
                path,
                "key",
                help="remove it",
                severity=Severity.WARNING,
            )
        met: dict[Location, tuple[Rule, str]] = {}  # an earlier rule, and the first alternative of both
        for text in texts:
            earlier = [one for one in holders[text] if one.when is True or rule.when in (True, one.when)]
            if rule.override:
                replaced = [
                    one for one in earlier if rule.when in (True, one.when) and rule.having in (None, one.having)
                ]
                left.update((one.location, left[one.location] - 1) for one in replaced)
                holders[text] = [one for one in holders[text] if one not in replaced]
            elif earlier:
                met.setdefault(earlier[0].location, (earlier[0], text))
                continue
            holders[text].append(rule)
        for one, text in met.values():
            _report_pair(one, rule, text, findings)
    for rule in rules:
        if not left[rule.location]:
            message = f"later rules override {quoted(rule.pattern)} for everything that it matches"
            _warn_no_effect(message, rule, findings)


def _report_pair(earlier: Rule, later: Rule, text: str, findings: Findings) -> None:
    label = Label(earlier.location, f"`{earlier.style}` here")
    if (earlier.style, earlier.options) == (later.style, later.options):
        message = f"{quoted(text)} has the style `{later.style}` already"
        _warn_no_effect(message, later, findings, label)
        return
    difference = f"the styles `{earlier.style}` and `{later.style}`"
    if earlier.style == later.style:
        difference = f"the style `{later.style}` with different options"
    findings.add(
        CONTRADICTION,
        f"two rules give {quoted(text)} {difference}",
        later.location.path,
        "key",
        related=[label],
        help="make the patterns disjoint, or add `override: true` to the later rule",
    )


def _warn_no_effect(message: str, rule: Rule, findings: Findings, *related: Label) -> None:
    help = "remove the repeated part" if related else "remove the rule"
    path = rule.location.path
    findings.add(NO_EFFECT, message, path, "key", related=related, help=help, severity=Severity.WARNING)


def _check_emptiness(plan: PlanFile, sources: SourceMap, findings: Findings) -> None:
    there = {path for path, part in sources.files[plan.file].spans if part == "key"}
    sections = effective_sections(plan)
    rules = any(one.sums or any(map(one.rules, SECTIONS)) for one in plan.lineage)
    if not rules and not sections.data_parallel:
        _warn_nothing("the plan has no rules and no data_parallel section", (), "add rules", findings)
    for section in SECTIONS:
        path = section_path(section)
        inside = [other for other in SECTIONS if section_path(other)[: len(path)] == path]
        if path in there and not any(plan.rules(other) or other in plan.sums for other in inside):
            _warn_nothing(f"`{section}` has no rules", path, "add rules, or remove it", findings)
    if plan.data_parallel is not None and not plan.data_parallel.given:
        _warn_nothing("`data_parallel` is empty", ("data_parallel",), "remove it", findings)
    for field in ("activation_checkpointing", "compile"):
        own, effective = getattr(plan, field), getattr(sections, field)
        if own is not None and not effective.modules:
            inherited = any(one.modules for p in plan.lineage if (one := getattr(p, field)) is not None)
            has_units = sections.data_parallel is not None and bool(sections.data_parallel.units)
            if not inherited and ("modules" in effective.given or not has_units):
                message = f"`{field}` names no modules"
                _warn_nothing(message, (field,), "add `modules`, or remove it", findings)

    matrices = sections.separate_matrices
    if plan.separate_matrices is not None and matrices is not None and not (matrices.parts or matrices.heads):
        message = "`separate_matrices` names no matrices"
        _warn_nothing(message, ("separate_matrices",), "add `parts` or `heads`, or remove it", findings)


def _warn_nothing(message: str, path: tuple[str, ...], help: str, findings: Findings) -> None:
    findings.add(EMPTY_PART, message, path, "key", help=help, severity=Severity.WARNING)
