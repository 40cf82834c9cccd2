"""The form of a document: its fields and their values. pydantic finds the errors, the words are ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shardplan.core.diagnostics import Code
from shardplan.core.dtypes import NAMES
from shardplan.core.plan import SECTIONS, section_at, section_path
from shardplan.core.suggest import closest, did_you_mean
from shardplan.core.version import __version__
from shardplan.styles import canonical_style

from .document import ATTRIBUTE, TAGS, WORD, Document, PlanDocument
from .nodes import MapNode, Node, Path, Scalar, node_at, to_data
from .old_words import OLD, shares_of
from .parse_findings import Findings, describe, quoted
from .plan_texts import value_text
from .rule_options import takes

UNKNOWN_FIELD = Code("SP104")
WRONG_VALUE = Code("SP105")
VERSION = Code("SP114")

KNOWN_VERSION = "1"
_MISSING = "add a style, as in `{style: colwise, optional: true}`"
_SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_SHAPES = {
    WORD: "a word of letters, digits, `.`, `_` and `-`",
    ATTRIBUTE: "a Python name, or a path of names and places with dots",
}

# Error type of pydantic -> the required value.
_MUST_BE: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "bool_type": lambda context: "true or false",
    "int_type": lambda context: "a whole number",
    "string_type": lambda context: "text",
    "list_type": lambda context: "a list",
    "dict_type": lambda context: "a mapping",
    "model_type": lambda context: "a mapping",
    "literal_error": lambda context: re.sub("'([^']*)'", r"`\1`", context["expected"]),
    "union_tag_invalid": lambda context: _listed(context["expected_tags"][1:-1].split("', '")),
    "greater_than_equal": lambda context: f"at least {context['ge']}",
    "less_than_equal": lambda context: f"at most {context['le']}",
    "share_form": lambda context: "a `dim`, with `heads` or `like` or neither, or `groups` alone",
    "string_too_short": lambda context: "a text that is not empty",
    "string_too_long": lambda context: f"a text of at most {context['max_length']} characters",
    "too_short": lambda context: f"a list with at least {context['min_length']} entries",
    "string_pattern_mismatch": lambda context: _SHAPES[context["pattern"]],
}


def check_form(root: Node, findings: Findings) -> Document | None:
    """The document as the models have it; None, and findings, if its form is wrong."""
    if not isinstance(root, MapNode):
        message = f"a plan is a mapping, not {describe(root)}"
        findings.add(WRONG_VALUE, message, help='begin with `version: "1"`')
        return None
    try:
        return PlanDocument.model_validate(to_data(root))
    except ValidationError as error:
        for one in error.errors(include_url=False, include_input=False):
            if findings.full:
                break
            is_key = one["loc"][-1:] == ("[key]",) and one["type"].startswith("string_too_")
            if not is_key:  # keys are patterns: they are checked elsewhere
                _report(one["type"], _path(one["loc"], root), one.get("ctx", {}), root, findings)
        return None


def _path(loc: tuple[str | int, ...], root: Node) -> Path:
    """pydantic's location, without the names of the types that it chose."""
    path: Path = ()
    for step in loc:
        if step not in TAGS or node_at(root, (*path, step)) is not None:
            path = (*path, step)
    return path


def _report(kind: str, path: Path, context: dict[str, Any], root: Node, findings: Findings) -> None:
    node = node_at(root, path)
    if path == ("version",):
        _report_version(node, findings)
    elif kind == "extra_forbidden":
        name = str(path[-1])
        where = f" in {_subject(path[:-1])}" if len(path) > 1 else ""
        message = f"there is no field {quoted(name)}{where}"
        help, words = _right_field(path, root)
        findings.add(UNKNOWN_FIELD, message, path, "key", help=help, words=words)
    elif kind == "missing":
        message = f"{_subject(path[:-1])} has no `{path[-1]}`"
        findings.add(WRONG_VALUE, message, path[:-1], "key", help=_MISSING)
    elif kind == "without_style":
        help, words = _with_style(node)
        findings.add(WRONG_VALUE, f"{_subject(path)} has no `style`", path, help=help, words=words)
    elif path == ("extends",) and kind == "string_pattern_mismatch":
        return  # the search for a parent says where it may be
    else:
        must_be = _MUST_BE[kind](context)
        message = f"{_subject(path)} must be {must_be}, not {describe(node)}"
        help, words = _right_value(kind, must_be, node)
        if help is None and kind == "model_type" and section_at(path) is None and (known := _fields(path)):
            help = f"its fields are {_listed(known, 'and')}"
        findings.add(WRONG_VALUE, message, path, help=help, words=words)


Proposed = tuple[str | None, tuple[str | None, ...]]  # a help line, and the words it proposes


def _report_version(node: Node | None, findings: Findings) -> None:
    help = 'write `version: "1"`'
    if node is None:
        words: tuple[str, ...] = (f'version: "{KNOWN_VERSION}"',)
        findings.add(VERSION, "the plan has no `version`", (), "key", help=help + " at its beginning", words=words)
    elif isinstance(node, Scalar) and isinstance(node.value, str):
        if node.value.isdecimal() and int(node.value) > int(KNOWN_VERSION):
            message = f"the plan has version {quoted(node.value)} of the plan language, but shardplan {__version__} knows only `1`"
            help = f"upgrade shardplan (`pip install --upgrade shardplan`); for this one {help}"
        else:
            message = f"there is no version {quoted(node.value)} of the plan language"
        findings.add(VERSION, message, ("version",), help=help)
    else:
        message = f'the version must be the text "1", not {describe(node)}'
        words = (f'"{KNOWN_VERSION}"',) if isinstance(node, Scalar) and str(node.value) == KNOWN_VERSION else ()
        findings.add(VERSION, message, ("version",), help=help, words=words)


def _subject(path: Path) -> str:
    """The element at a path, in a message."""
    section = section_at(path)
    if section is not None and len(path) > (depth := len(section_path(section))):
        rule = f"the rule {quoted(str(path[depth]))}"
        return rule if len(path) == depth + 1 else f"{_dotted(path[depth + 1 :])} of {rule}"
    return _dotted(path)


def _dotted(path: Path) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return quoted("".join(steps).removeprefix("."))


def _right_field(path: Path, root: Node) -> Proposed:
    """Where an unknown field belongs, or its probable name."""
    name, known = str(path[-1]), _fields(path[:-1])
    if len(path) == 1:
        homes = [home for home in known if home not in SECTIONS and name in _fields((home,))]
        if len(homes) == 1:
            return f"`{name}` belongs under `{homes[0]}`", ()
        if "." in name or "*" in name:
            return (
                "a rule belongs under `tensor_parallel`, `sequence_parallel`, `expert_parallel` or `context_parallel`",
                (),
            )
    rule = to_data(node_at(root, path[:-1]) or MapNode(()))
    if name in OLD and "shares" in known and isinstance(rule, dict):
        if (shares := shares_of(rule)) is not None:
            return f"write {quoted(f'shares: {value_text(shares)}', 300)} instead; `shardplan fmt` does so in YAML", ()
        return "write `shares`; a norm's groups stand at a number of it, `shares: {group_size: {groups: n_groups}}`", ()
    near = closest(name, known)
    if near:
        return did_you_mean(name, near), (near,)
    style = node_at(root, (*path[:-1], "style"))
    if "style" in known and isinstance(style, Scalar) and isinstance(style.value, str) and canonical_style(style.value):
        known = tuple(field for field in known if takes(style.value, field))
        return f"the fields of a rule with the style {quoted(style.value)} are {_listed(known, 'and')}", ()
    return f"the fields are {_listed(known, 'and')}", ()


def _with_style(node: Node | None) -> Proposed:
    """A proposal for a rule without a style, if its options alone say something (shares of a module's code): the style that changes nothing."""
    said: Any = to_data(node) if isinstance(node, MapNode) else {}
    if "shares" not in said or not all(takes("replicate", name) for name in said):
        return _MISSING, ()
    rule = value_text({"style": "replicate", **said})
    return f"write {quoted(rule, 300)}: this style leaves the module itself as it is", (rule,)


def _right_value(kind: str, must_be: str, node: Node | None) -> Proposed:
    match node:
        case Scalar(str(text)) if kind == "model_type" and (dtype := NAMES.get(text)) is not None:
            said = value_text({"param": dtype, "reduce": "float32"})
            return f"write `{said}`: the dtype in which layers compute, and that in which gradients are added up", (
                said,
            )
        case None | Scalar(None):
            return "give it a value, or remove the line", (None,)
        case Scalar(str(text)) if must_be.startswith("true") and text.lower() in _SWITCHES:
            word = _SWITCHES[text.lower()]
            return f"write `{word}`; in YAML 1.2 {quoted(text)} is a text", (word,)
        case Scalar(str(text)) if kind == "list_type":
            return "write " + quoted(f"[{text}]"), (f"[{text}]",)
        case Scalar(str(text)) if near := closest(text, re.findall("`([^`]*)`", must_be)):
            return did_you_mean(text, near), (near,)
        case Scalar(str(text)) if "number" in must_be and text.isdecimal():
            return "remove the quotes", (text,)
        case Scalar(int(), text) if "mapping with `dim`" in must_be:
            return f"write `{{dim: {text}}}`", (f"{{dim: {text}}}",)
        case Scalar(bool() | int() | float(), text) if kind == "string_type":
            return "put it in quotes: " + quoted(f'"{text}"'), (f'"{text}"',)
    return None, ()


def _fields(path: Path) -> tuple[str, ...]:
    """The fields of the mapping at a path."""
    model: type[BaseModel] = PlanDocument
    for step in path:
        field = model.model_fields.get(str(step))
        model = (_model_in(field.annotation) if field else None) or model
    names = tuple(field.alias or name for name, field in model.model_fields.items())
    return () if path and model is PlanDocument else names


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in a field's annotation."""
    annotation = getattr(annotation, "__value__", annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


def _listed(words: Sequence[str], last: str = "or") -> str:
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end
