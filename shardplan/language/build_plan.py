"""A checked document -> `PlanFile`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardplan.core.diagnostics import Location
from shardplan.core.options import options
from shardplan.core.plan import SECTIONS, PlanFile, Rule
from shardplan.core.sections import Section, Sections
from shardplan.core.sum_outputs import SumRule
from shardplan.styles import canonical_style

from .document import Document, RuleOptions, SectionModel, Strict
from .nodes import Path


def build_plan(document: Document, file: str, name: str, parent: PlanFile | None) -> PlanFile:
    """The plan that a document without errors says.

    Args:
        file: its display name.
        name: the plan's name, where the document has none.
        parent: the plan that it extends.
    """
    return PlanFile(
        name=document.name or name,
        file=file,
        version=document.version,
        description=document.description,
        models=tuple(document.models),
        tensor_parallel=_rules(document.tensor_parallel, "tensor_parallel", file),
        sequence_parallel=_rules(document.sequence_parallel, "sequence_parallel", file),
        **read_section(Sections, document, (), file).values,
        parent=parent,
        configurations=document.configurations,
        sums={section: found for section in SECTIONS if (found := _sums(getattr(document, section), section, file))},
    )


Rules = Mapping[str, str | RuleOptions | list[RuleOptions]]


def _rules(rules: Rules, section: str, file: str) -> tuple[Rule, ...]:
    """Those that have a style; others say `sum_outputs` alone."""
    return tuple(
        _rule(key, entry, location)
        for key, entry, location in _entries(rules, section, file)
        if isinstance(entry, str) or entry.style is not None
    )


def _sums(rules: Rules, section: str, file: str) -> tuple[SumRule, ...]:
    return tuple(
        SumRule(
            pattern=key,
            outputs=tuple(entry.sum_outputs),
            location=Location(file, (*location.path, "sum_outputs")),
            styled=entry.style is not None,
            optional=entry.optional,
            when=entry.when or True,
        )
        for key, entry, location in _entries(rules, section, file)
        if not isinstance(entry, str) and entry.sum_outputs is not None
    )


def _entries(rules: Rules, section: str, file: str) -> Iterator[tuple[str, str | RuleOptions, Location]]:
    """Each rule with its key and its place: those of a list stand one after the other."""
    for key, entry in rules.items():
        if isinstance(entry, list):
            for i, one in enumerate(entry):
                yield key, one, Location(file, (section, key, i), "value")
        else:
            yield key, entry, Location(file, (section, key))


def _rule(pattern: str, entry: str | RuleOptions, location: Location) -> Rule:
    written = entry if isinstance(entry, str) else entry.style
    assert written is not None, pattern  # a rule without a style is passed over
    style = canonical_style(written)
    assert style is not None, written
    named = () if isinstance(entry, str) else entry.model_fields_set
    options = {name: getattr(entry, name) for name in named}
    options.pop("style", None)
    options.pop("sum_outputs", None)
    if isinstance(options.get("packed"), list):
        options["packed"] = tuple(map(str, options["packed"]))
    for name in ("divide", "divides"):
        if name in options:
            options[name] = (options[name],) if isinstance(options[name], str) else tuple(options[name])
    if "read_outside" in options:
        options["read_outside"] = tuple(options["read_outside"])
    return Rule(pattern, style, location, **options)


def read_section(section: type[Section], model: Strict, path: Path, file: str) -> Section:
    """A section from what a document says of it."""
    names = [name for name in options(section) if name in model.model_fields_set]
    values = {name: _value(getattr(model, name), (*path, name), file) for name in names}
    given = {name: Location(file, (*path, name)) for name in names}
    return section(**values, location=Location(file, path), given=given)


def _value(value: object, path: Path, file: str) -> object:
    if isinstance(value, SectionModel):
        return read_section(value.section, value, path, file)
    return tuple(value) if isinstance(value, list) else value
