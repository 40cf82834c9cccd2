"""The JSON Schema (draft 2020-12) of reports, made from their dataclasses: types from annotations, texts from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .json import AS_TEXT, FORMS, VERSION, form_of

ID = f"urn:shardplan:report:{VERSION}"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    int: ("integer",),
    float: ("number", "null"),  # null: a value that JSON has no number for
    bool: ("boolean",),
    NoneType: ("null",),
}
_ARGUMENT = re.compile(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def report_schema() -> dict[str, Any]:
    """The schema of everything that `--json` prints."""
    definitions: dict[str, Any] = {}
    kinds = [_object(made, definitions, form.kind) for made, form in FORMS.items() if form.kind]
    return {
        "$schema": DIALECT,
        "$id": ID,
        "title": "shardplan report",
        "description": "What shardplan prints with --json.",
        "oneOf": kinds,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type hint; dataclasses are put into `definitions` and referred to."""
    hint = getattr(hint, "__supertype__", hint)  # for a NewType
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        if all(argument in TYPES for argument in arguments):
            return _type(*arguments)
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is tuple:
        size = len(arguments)
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
    if origin is Mapping:
        keys, values = (_schema(argument, definitions) for argument in arguments)
        names = {"propertyNames": keys} if "enum" in keys else {}  # other keys are texts, or numbers as texts
        return {"type": "object", **names, "additionalProperties": values}
    if issubclass(hint, Enum):
        return {"enum": [one.value for one in hint]}
    if issubclass(hint, AS_TEXT):
        return _type(str)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # holds the place: a dataclass may contain itself
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return _type(hint)


def _type(*types: type) -> dict[str, Any]:
    names = list(dict.fromkeys(name for one in types for name in TYPES[one]))
    return {"type": names if len(names) > 1 else names[0]}


def _object(made: Any, definitions: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """The schema of a dataclass or, with a kind, of a report."""
    form, hints = form_of(made), get_type_hints(made)
    description, texts = _texts(made)
    properties: dict[str, Any] = {"kind": {"const": kind}, "version": {"const": VERSION}} if kind else {}
    for name, of in form.computed.items():
        properties[name] = _schema(get_type_hints(of)["return"], definitions) | _texts(of)[0]
    for name in (f.name for f in fields(made) if f.name not in form.without):
        properties[name] = _schema(hints[name], definitions) | texts.get(name, {})
    return {
        "type": "object",
        **description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _texts(documented: Any) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The descriptions of a class or function and of each of its arguments, from its docstring."""
    head, _, rest = (inspect.getdoc(documented) or "").partition("\nArgs:\n")
    if isinstance(documented, type) and head.startswith(f"{documented.__name__}("):  # dataclass wrote it
        head = ""
    texts = {
        name: _described(text)
        for names, text in _ARGUMENT.findall(rest.partition("\nRaises:")[0])
        for name in names.split(", ")
    }
    return _described(head), texts


def _described(text: str) -> dict[str, str]:
    return {"description": " ".join(text.split())} if text else {}
