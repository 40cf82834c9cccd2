"""A checked document -> `PlanFile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from shardplan.core.diagnostics import Location
from shardplan.core.options import options
from shardplan.core.plan import FIELD_OF, PlanFile, Rule, Section, section_path
from shardplan.core.sections import Section as OptionSection
from shardplan.core.sections import Sections
from shardplan.core.shares import Share
from shardplan.core.sum_outputs import SumRule
from shardplan.styles import canonical_style

from .document import Document, RuleOptions, SectionModel, ShareOptions, Strict
from .nodes import Path


def build_plan(
    document: Document, file: str, name: str, parent: PlanFile | None, *, built_in: bool = False
) -> PlanFile:
    """The plan that a document without errors describes.

    Args:
        file: its display name.
        name: the plan's name, if the document has none.
        parent: the plan that it extends.
        built_in: whether it comes with shardplan.
    """
    written: dict[Section, Rules] = {
        "tensor_parallel": document.tensor_parallel,
        "sequence_parallel": document.sequence_parallel,
        "expert_parallel": document.expert_parallel.model_extra or {},
        "context_parallel": document.context_parallel,
        "expert_parallel.sequence_parallel": document.expert_parallel.sequence_parallel,
    }
    rules_of: dict[str, Any] = {FIELD_OF[section]: _rules(rules, section, file) for section, rules in written.items()}
    return PlanFile(
        name=document.name or name,
        file=file,
        version=document.version,
        description=document.description,
        models=tuple(document.models),
        **rules_of,
        **read_section(Sections, document, (), file).values,
        parent=parent,
        built_in=built_in,
        configurations=document.configurations,
        refused_arguments=tuple(document.refused_arguments),
        sums={section: found for section, rules in written.items() if (found := _sums(rules, section, file))},
    )


Rules = Mapping[str, str | RuleOptions | list[RuleOptions]]


def _rules(rules: Rules, section: Section, file: str) -> tuple[Rule, ...]:
    """The rules with a style; others have only `sum_outputs`."""
    return tuple(
        _rule(key, entry, location)
        for key, entry, location in _entries(rules, section, file)
        if isinstance(entry, str) or entry.style is not None
    )


def _sums(rules: Rules, section: Section, file: str) -> tuple[SumRule, ...]:
    return tuple(
        SumRule(
            pattern=key,
            outputs=tuple(entry.sum_outputs),
            location=Location(file, (*location.path, "sum_outputs")),
            styled=entry.style is not None,
            optional=entry.optional,
            when=entry.when or True,
            having=entry.having,
        )
        for key, entry, location in _entries(rules, section, file)
        if not isinstance(entry, str) and entry.sum_outputs is not None
    )


def _entries(rules: Rules, section: Section, file: str) -> Iterator[tuple[str, str | RuleOptions, Location]]:
    """Each rule with its key and its place; those of a list in sequence."""
    for key, entry in rules.items():
        if isinstance(entry, list):
            for i, one in enumerate(entry):
                yield key, one, Location(file, (*section_path(section), key, i), "value")
        else:
            yield key, entry, Location(file, (*section_path(section), key))


def _rule(pattern: str, entry: str | RuleOptions, location: Location) -> Rule:
    written = entry if isinstance(entry, str) else entry.style
    assert written is not None, pattern  # rules without a style are skipped
    style = canonical_style(written)
    assert style is not None, written
    named = () if isinstance(entry, str) else entry.model_fields_set
    options = {name: getattr(entry, name) for name in named}
    options.pop("style", None)
    options.pop("sum_outputs", None)
    if isinstance(options.get("packed"), list):
        options["packed"] = tuple(map(str, options["packed"]))
    if "arguments" in options:
        options["arguments"] = tuple(options["arguments"].items())
    if "shares" in options:
        options["shares"] = tuple(_shares(options["shares"]))
    for name in ("divides", "heads"):
        if name in options:
            options[name] = tuple(map(str, options[name] if isinstance(options[name], list) else [options[name]]))
    if "read_outside" in options:
        options["read_outside"] = tuple(options["read_outside"])
    return Rule(pattern, style, location, **options, stated=frozenset(options))


def _shares(written: str | Mapping[str, str | ShareOptions] | list[Any]) -> Iterator[Share]:
    match written:
        case str():
            yield Share(written)
        case Mapping():
            for name, one in written.items():
                yield Share(name, one) if isinstance(one, str) else _share(name, one)
        case _:
            for one in written:
                yield from _shares(one)


def _share(name: str, one: ShareOptions) -> Share:
    groups, heads = (None if count is None else str(count) for count in (one.groups, one.heads))
    return Share(name, groups=groups, dim=one.dim, heads=heads, like=one.like)


_S = TypeVar("_S", bound=OptionSection)


def read_section(section: type[_S], model: Strict, path: Path, file: str) -> _S:
    """A section from its part of a document."""
    names = [name for name in options(section) if name in model.model_fields_set]
    values = {name: _value(getattr(model, name), (*path, name), file) for name in names}
    given = {name: Location(file, (*path, name)) for name in names}
    return section(**values, location=Location(file, path), given=given)


def _value(value: object, path: Path, file: str) -> object:
    if isinstance(value, SectionModel):
        return read_section(value.section, value, path, file)
    return tuple(value) if isinstance(value, list) else value
