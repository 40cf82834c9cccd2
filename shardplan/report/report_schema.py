"""JSON Schemas (draft 2020-12) of records, and that of the reports."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .diff_records import DiffReport
from .fit_json import FitReport
from .lock_json import LockReport
from .records import EstimateReport, FindingsReport, ProgramReport, SweepReport

ID = "urn:shardplan:report:1"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REPORTS = (
    FindingsReport,
    EstimateReport,
    SweepReport,
    FitReport,
    ProgramReport,
    DiffReport,
    LockReport,
)
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def report_schema() -> dict[str, Any]:
    """The schema of everything that `--json` prints."""
    definitions: dict[str, Any] = {}
    kinds = [_schema(record, definitions) for record in REPORTS]
    return {
        "$schema": DIALECT,
        "$id": ID,
        "title": "shardplan report",
        "description": "What shardplan prints with --json.",
        "oneOf": kinds,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type hint; records are put into `definitions` and referred to."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return {**_schema(arguments[0], definitions), "description": arguments[1]}
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (Union, UnionType):
        if all(argument in PLAIN for argument in arguments):
            return {"type": [PLAIN[argument] for argument in arguments]}
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is tuple:
        assert arguments[1:] == (Ellipsis,), hint
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if is_dataclass(hint):
        return _record(hint, definitions)
    return {"type": PLAIN[hint]}


def _record(record: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    name = record.__name__
    if name not in definitions:
        definitions[name] = {}  # holds the place: a record may hold itself
        hints = get_type_hints(record, include_extras=True)
        own_doc = record.__doc__ and not record.__doc__.startswith(f"{name}(")
        definitions[name] = {
            "type": "object",
            **({"description": " ".join(record.__doc__.split())} if own_doc else {}),
            "properties": {f.name: _schema(hints[f.name], definitions) for f in fields(record)},
            "required": [f.name for f in fields(record)],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}
