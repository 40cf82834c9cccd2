"""Values of fields that several sections share, and the common base of all sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

from shardplan.core import expressions
from shardplan.language import globs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WORD = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
ATTRIBUTE = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*$"

TAGS: set[str] = set()  # the words for the types of fields that allow several


class Either:
    """Annotates a field of several types: a value's Python type decides which of them is meant.

    Args:
        words: for each member of the union, in order, the Python type of its values and its name in a message.
    """

    def __init__(self, words: Mapping[type, str]):
        self.words = words
        TAGS.update(words.values())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        words, options = self.words, get_args(source)
        literals = {cls: get_args(one) for cls, one in zip(words, options, strict=True) if get_origin(one) is Literal}
        tagged = tuple(Annotated[one, Tag(text)] for one, text in zip(options, words.values(), strict=True))

        def choose(value: Any) -> str:
            fits = type(value) in words and value in literals.get(type(value), (value,))
            return words[type(value)] if fits else ""

        return handler(Annotated[Union[tagged], Discriminator(choose)])  # noqa: UP007  of a tuple


class _Stated:
    """Annotates an optional field: a document cannot say None, which is the value of a field that it omits."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        inner, _none = get_args(source)
        return handler(inner)


T = TypeVar("T")
Given = Annotated[T | None, _Stated()]


def default_of(cls: type[DataclassInstance], name: str) -> Any:
    """The default of a dataclass's field, for documentation: no document is completed from it."""
    return next(field.default for field in fields(cls) if field.name == name)


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
ConditionText = Annotated[
    str,
    Field(
        min_length=1,
        max_length=expressions.MAX_LENGTH,
        description="A condition over the numbers and booleans of the model's configuration, with == != < <= > >=, not, and, or.",
        examples=["use_qk_norm", "num_local_experts > 0 and not q_lora_rank"],
    ),
]
AttributeName = Annotated[str, Field(pattern=ATTRIBUTE, max_length=200)]


class Strict(BaseModel):
    """A mapping with a fixed set of fields, read strictly."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
