"""Where a field of a section stands in the plan."""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.diagnostics import Label
from shardplan.core.sections import Section


def field_label(section: Section | None, field: str) -> Label | None:
    """The value of the field, in the document that sets it; else the section, if it stands in a document at
    all."""
    if section is None:
        return None
    if field in section.given:
        return Label(replace(section.given[field], part="value"))
    return Label(section.location) if section.location else None
