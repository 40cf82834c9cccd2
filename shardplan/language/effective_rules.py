"""The rules of a plan and its ancestors, as text, compared without a model."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.by_key import by_key
from shardplan.core.plan import SECTIONS, PlanFile, Rule, Section
from shardplan.core.plan_changes import FieldChange, RuleChange, Said
from shardplan.core.sum_outputs import SumRule

from .globs import parse_glob
from .inherit import effective_sections
from .plan_texts import rule_text, section_fields, value_text

Key = tuple[Section, str]  # a section, and a pattern without alternatives


def compare_rules(old: PlanFile, new: PlanFile) -> tuple[RuleChange, ...]:
    """The patterns for which two plans have different rules; equal changes are grouped. A child's rule replaces its
    parent's of the same pattern. Which of two different patterns applies to a module is not known without a model.
    """
    before, after = effective_rules(old), effective_rules(new)
    keys = dict.fromkeys((*before, *after))
    said = (((section, before.get((section, p), ()), after.get((section, p), ())), p) for section, p in keys)
    groups = by_key(one for one in said if one[0][1] != one[0][2])
    return tuple(RuleChange(section, tuple(names), *pair) for (section, *pair), names in groups.items())


def effective_rules(plan: PlanFile) -> Mapping[Key, tuple[Said, ...]]:
    """The rules of a plan for each pattern without alternatives: several, if they have conditions."""
    said: dict[Key, tuple[Said, ...]] = {}
    sums: dict[Key, Said] = {}
    for one in plan.lineage:
        for section in SECTIONS:
            for rule in one.rules(section):
                for text in parse_glob(rule.pattern).texts:
                    known = said.get((section, text), ()) if isinstance(rule.when, str) else ()
                    said[section, text] = (*known, Said(_with_flags(rule), rule.location))
            for sum_rule in one.sums.get(section, ()):
                for text in parse_glob(sum_rule.pattern).texts:
                    sums[section, text] = Said(_sum_text(sum_rule), sum_rule.location)
    for key, one_sum in sums.items():
        said[key] = (*said.get(key, ()), one_sum)
    return {key: rules for key, rules in said.items() if [rule.text for rule in rules] != ["none"]}


def _with_flags(rule: Rule) -> str:
    return rule_text(rule) + (" (optional)" if rule.optional else "")


def _sum_text(rule: SumRule) -> str:
    flags = [" (optional)"] if rule.optional else []
    flags += [f" having {rule.having}"] if rule.having is not None else []
    flags += [f" when {rule.when}"] if isinstance(rule.when, str) else []
    return "".join((rule.text, *flags))


def compare_fields(old: PlanFile, new: PlanFile) -> tuple[FieldChange, ...]:
    """The fields that two plans set to different values: fields of their sections, and the models they are for."""
    return field_changes(_all_fields(old), _all_fields(new))


def _all_fields(plan: PlanFile) -> dict[str, str]:
    about = {"models": value_text(plan.models)} if plan.models else {}
    about |= {"for": plan.configurations} if plan.configurations is not None else {}
    about |= {"refused_arguments": value_text(tuple(plan.refused))} if plan.refused else {}
    return about | section_fields(effective_sections(plan))


Value = str | tuple[str, ...]


def field_changes(old: Mapping[str, Value], new: Mapping[str, Value]) -> tuple[FieldChange, ...]:
    """The fields that differ; a missing one is "-"."""
    names = dict.fromkeys((*old, *new))
    pairs = ((name, old.get(name, "-"), new.get(name, "-")) for name in names)
    return tuple(FieldChange(*one) for one in pairs if one[1] != one[2])
