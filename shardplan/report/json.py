"""Reports as JSON: the fields of their dataclasses, under the names that they have in Python."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

from shardplan.core.diagnostics import Location
from shardplan.core.report import Report
from shardplan.core.sources import SourceMap

from .json_forms import AS_TEXT, PLAIN, form_of
from .width import is_hidden

VERSION: Final = "2"  # raised when a field is removed or changes its meaning; new fields do not raise it


def to_json(report: object, *, proof: bool = False) -> dict[str, Any]:
    """A report as JSON data, in the form of schemas/report.schema.json: its `kind`, the `version` of the schema, and its fields.

    Args:
        proof: include everything that the proof of a plan compared.

    Raises:
        TypeError: an object that no command reports.
    """
    form = form_of(type(report))
    if not form.kind:
        raise TypeError(f"{type(report).__name__} is no report")
    data = {"kind": form.kind, "version": VERSION, **_data(report, SourceMap())}
    return data | {"proof": None} if isinstance(report, Report) and not proof else data


def json_text(data: Any) -> str:
    """JSON data as indented text; characters that a terminal would obey are escaped. Raises ValueError for a number that JSON
    does not have."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() and "\x7f" not in text else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char == "\n" or not is_hidden(char):
        return char
    return "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def _data(value: Any, sources: SourceMap) -> Any:
    """A value as JSON data.

    Args:
        sources: the sources of its report, which give the lines of places.
    """
    match value:
        case Enum():
            return value.value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _data(one, sources) for key, one in value.items()}
        case tuple() | list():
            return [_data(one, sources) for one in value]
        case Location():
            value = sources.placed(value)
    if isinstance(value, AS_TEXT):
        return str(value)
    if not is_dataclass(value):
        assert isinstance(value, PLAIN), value
        return value
    form, sources = form_of(type(value)), getattr(value, "sources", sources)
    computed = {name: of(value) for name, of in form.computed.items()}
    stored = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in form.without}
    return {name: _data(one, sources) for name, one in (computed | stored).items()}
