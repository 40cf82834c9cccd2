"""A field of a section: its text, examples and bounds, in addition to its type and default."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Option:
    """The description of a field.

    Args:
        text: its purpose, in sentences; empty if its words are records, which have texts.
        examples: values, as written in a document.
        least, most: the bounds of a number, or of the length of a text; None is no bound.
        number: the meaning of a number, in a message about a field that accepts words too.
    """

    text: str
    examples: tuple[object, ...]
    least: int | None
    most: int | None
    number: str


def option(
    default: _T,
    text: str,
    *examples: object,
    least: int | None = None,
    most: int | None = None,
    number: str = "a number",
) -> _T:
    """A dataclass's field that documents may write; the arguments are those of `Option`.

    Args:
        default: its value in a document that leaves it out.
        examples: without any, the opposite of a switch's default.
    """
    return field(default=default, metadata={"option": Option(text, examples or (not default,), least, most, number)})


def options(section: type) -> dict[str, Option]:
    """The fields of a dataclass that documents may write, in order."""
    return {one.name: one.metadata["option"] for one in fields(section) if "option" in one.metadata}
