"""What fields of several sections hold, and what all sections have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from shardplan.core import expressions, globs

WORD = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ATTRIBUTE = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"

TAGS: set[str] = set()  # the words for the types of fields that may have several


def either(*options: tuple[type, Any, str]) -> Any:
    """A field of several types.

    Args:
        options: for each the Python type of the value, the annotation, and its words in a message.
    """
    words = {cls: text for cls, _, text in options}
    literals = {cls: get_args(one) for cls, one, _ in options if get_origin(one) is Literal}
    tagged = tuple(Annotated[annotation, Tag(text)] for _, annotation, text in options)
    TAGS.update(words.values())

    def choose(value: Any) -> str:
        fits = type(value) in words and value in literals.get(type(value), (value,))
        return words[type(value)] if fits else ""

    return Annotated[Union[tagged], Discriminator(choose)]  # noqa: UP007  of a tuple


def one_of(words: Iterable[str]) -> Any:
    """A field that is one of some words."""
    return Literal[tuple(words)]


def default_of(cls: type, name: str) -> Any:
    """The default of a dataclass's field, for documentation: no document is completed from here."""
    return cls.__dataclass_fields__[name].default


GlobText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=globs.MAX_LENGTH,
        description="A glob over whole dotted names: `*`, `?` and `[...]` never match a dot, `**` matches "
        "zero or more segments, `{a,b}` are alternatives.",
        examples=["model.layers.*"],
    ),
]
ExpressionText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=expressions.MAX_LENGTH,
        description="An expression over the numbers of the model's configuration, with + - * // and parentheses.",
        examples=["num_key_value_heads * (hidden_size // num_attention_heads)"],
    ),
]
AttributeName = Annotated[str, Field(pattern=ATTRIBUTE, max_length=200)]


class Section(BaseModel):
    """A mapping with a fixed set of fields, read strictly."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
