"""Which style has which option, as the style records declare it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from shardplan.core.plan import Output
from shardplan.styles import ALIASES, NONE, STYLES, Style, canonical_style

# Options of some styles only. `style`, `optional` and `override` go with every style, and with `none`.
TAKEN_BY: dict[str, Callable[[Style], bool]] = {
    "argument": lambda style: style.argument_option,
    "arguments": lambda style: style.argument_option,
    "grad": lambda style: style.options.grad,
    "output": lambda style: bool(style.options.output),
    "packed": lambda style: style.packed_option,
    "heads": lambda style: style.heads_option,
    "shares": lambda style: True,
    "fused": lambda style: True,
    "divides": lambda style: True,
    "seq_dim": lambda style: style.seq_option,
    "read_outside": lambda style: style.read_outside_option,
    "exchange": lambda style: style.exchange_option,
    "regather": lambda style: style.regather_option,
}


def spellings(style: Style) -> tuple[str, ...]:
    """All names of a style."""
    return (style.name, *style.aliases)


def style_names() -> tuple[str, ...]:
    """Every name that a rule's style can have, `none` last."""
    return (*STYLES, *ALIASES, NONE)


def moving_styles() -> tuple[str, ...]:
    """The styles that an entry of `arguments` may have: styles that move an argument and do nothing else."""
    return tuple(style.name for style in STYLES.values() if style.moves_one_argument)


def takers(option: str, value: str | None = None) -> tuple[str, ...]:
    """The names of the styles that have an option; for `output`, that have this value of it."""
    return tuple(
        name
        for style in STYLES.values()
        if TAKEN_BY[option](style) and (value is None or value in style.options.output)
        for name in spellings(style)
    )


def group_takers() -> tuple[str, ...]:
    """The names of the styles whose shares may have `groups`."""
    return tuple(name for style in STYLES.values() if style.features.means for name in spellings(style))


def takes(name: str, option: str) -> bool:
    """Whether the style of that name has the option."""
    style = STYLES.get(canonical_style(name) or "")
    return option not in TAKEN_BY or (style is not None and TAKEN_BY[option](style))


def style_schema() -> dict[str, Any]:
    """The JSON Schema of a style's name, each with the text that an editor shows."""
    described = [(style.name, style.summary) for style in STYLES.values()]
    described += [(alias, f"The same as `{name}`.") for alias, name in ALIASES.items()]
    described.append((NONE, "Removes what the plan inherits for these modules."))
    return {
        "type": "string",
        "oneOf": [{"const": name, "description": text} for name, text in described],
    }


def option_rules() -> list[dict[str, Any]]:
    """JSON Schema conditions on a rule with options: a rule with this option has one of these styles."""
    rules: list[tuple[dict[str, Any], tuple[str, ...]]]
    rules = [({"required": [option]}, takers(option)) for option in TAKEN_BY]
    grouped = {"type": "object", "not": {"additionalProperties": {"not": {"type": "object", "required": ["groups"]}}}}
    shares = {"anyOf": [grouped, {"type": "array", "contains": grouped}]}
    rules.append(({"required": ["shares"], "properties": {"shares": shares}}, group_takers()))
    rules += [
        ({"required": ["output"], "properties": {"output": {"const": value}}}, takers("output", value))
        for value in get_args(Output)
    ]
    return [{"if": condition, "then": {"properties": {"style": {"enum": list(names)}}}} for condition, names in rules]


def none_rule() -> dict[str, Any]:
    """The JSON Schema condition that only a plan that extends another uses `none`."""
    removal = {
        "anyOf": [
            {"const": NONE},
            {"type": "object", "required": ["style"], "properties": {"style": {"const": NONE}}},
        ]
    }
    section = {"additionalProperties": {"not": {"anyOf": [removal, {"type": "array", "contains": removal}]}}}
    sections = dict.fromkeys(("tensor_parallel", "sequence_parallel", "context_parallel"), section)
    return {"if": {"not": {"required": ["extends"]}}, "then": {"properties": sections}}
