"""Text of a rule or of a section's field, as a plan would have it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardplan.core.plan import Rule, stated_options
from shardplan.core.sections import Section, Sections

from .scalars import resolve

_BEGINS = "{}[]*&!|>'\"%@`#,?:- "  # text that begins so needs quotes
_ENDS = re.compile(r": | #|:$| $")


def rule_text(rule: Rule) -> str:
    """`colwise`, or `{style: colwise, output: gather}`: the options, except those that all rules have."""
    said = stated_options(rule)
    if isinstance(rule.when, str):
        said["when"] = rule.when
    return f"{{style: {rule.style}, {_pairs(said)}}}" if said else rule.style


def section_fields(sections: Sections) -> dict[str, str]:
    """Each field of each section present -> its value. Sections inside sections have their own fields."""
    return dict(_fields("", sections))


def _fields(prefix: str, section: Section) -> Iterator[tuple[str, str]]:
    for name, value in section.values.items():
        if isinstance(value, Section):
            yield from _fields(f"{prefix}{name}.", value)
        elif value not in (None, ()):
            yield f"{prefix}{name}", value_text(value)


def value_text(value: Any) -> str:
    """A value in YAML's flow style; a plan that says it has that value."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return word_text(value, inside=True)
        case Mapping():
            return f"{{{_pairs(value)}}}"
        case tuple() | list():
            return f"[{', '.join(map(value_text, value))}]"
        case _:
            return str(value)


def word_text(word: str, *, inside: bool = False) -> str:
    """A text on one line, as YAML writes it: without quotes if that means the same.

    Args:
        inside: it is in brackets or braces.
    """
    plain = resolve(word) == word and word[0] not in _BEGINS and not _ENDS.search(word)
    return word if plain and not (inside and set(word) & set(",[]{}?")) else "'" + word.replace("'", "''") + "'"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value_text(value)}" for name, value in values.items())
