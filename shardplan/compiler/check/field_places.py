"""The place of a section's field in the plan."""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.diagnostics import Label
from shardplan.core.sections import Section


def field_label(section: Section | None, field: str) -> Label | None:
    """The field's value, in the document that sets it; else the section, if a document has it."""
    if section is None:
        return None
    if field in section.given:
        return Label(replace(section.given[field], part="value"))
    return Label(section.location) if section.location else None
