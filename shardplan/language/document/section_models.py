"""The models of sections, made from their dataclasses in `core.sections`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import GenericAlias, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, create_model

from shardplan.core.dtypes import NAMES
from shardplan.core.options import Option, options
from shardplan.core.sections import BackendName, Dtype, Glob, Section
from shardplan.styles.backends import BACKENDS

from .field_values import Either, GlobText, Strict, default_of

_M = TypeVar("_M", bound=Strict)

# Types of text whose values are names of records, with the text of each record.
RECORDS: Mapping[object, Mapping[str, str]] = {
    BackendName: {backend.name: backend.summary for backend in BACKENDS.values()}
}


class SectionModel(Strict):
    """The model of a section."""

    section: ClassVar[type[Section]]


def model_of(section: type[Section]) -> type[SectionModel]:
    """The model of a section: its fields, and its dataclass's name and text."""
    model = with_sections(f"{section.__name__}Fields", section.__doc__, SectionModel, section)
    model.section = section
    return model


def with_sections(name: str, text: str | None, base: type[_M], section: type[Section]) -> type[_M]:
    """A model with the fields of another and those of a section.

    Args:
        name, text: the new model's name and text.
    """
    types = _types(section)
    members: dict[str, Any] = {
        field: (_type(types[field], option), _field(types[field], option, default_of(section, field)))
        for field, option in options(section).items()
    }
    return create_model(name, __base__=base, __doc__=text, **members)


def glob_lists(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of all globs and lists of globs in a section and its subsections."""
    for name, hint in _types(section).items():
        if hint in (Glob, tuple[Glob, ...]):
            yield (*path, name)
        elif _is_section(hint):
            yield from glob_lists(hint, (*path, name))


def _types(section: type[Section]) -> dict[str, Any]:
    """The types that a document can write; None is the value of a field that it omits."""
    hints = get_type_hints(section, include_extras=True)
    return {name: _without_none(hints[name]) for name in options(section)}


def _is_section(hint: Any) -> TypeGuard[type[Section]]:
    return isinstance(hint, type) and issubclass(hint, Section)


def _field(hint: Any, option: Option, default: Any) -> Any:
    records = " ".join(f"`{name}`: {summary}." for name, summary in RECORDS.get(hint, {}).items())
    return Field(
        default=list(default) if isinstance(default, tuple) else default,
        description=option.text or records,
        examples=list(option.examples),
    )


def _type(hint: Any, option: Option) -> Any:
    """The type that pydantic reads for a field's type."""
    if hint == Glob:
        return GlobText
    if hint == Dtype:
        return Annotated[Literal[tuple(NAMES)], AfterValidator(NAMES.__getitem__)]
    if hint in RECORDS:
        return Literal[tuple(RECORDS[hint])]
    if hint is int:
        return Annotated[int, Field(ge=option.least, le=option.most)]
    if hint is str:
        return Annotated[str, Field(min_length=option.least, max_length=option.most)]
    if _is_section(hint):
        return model_of(hint)
    if get_origin(hint) is tuple:
        return GenericAlias(list, (_type(get_args(hint)[0], option),))
    if _is_union(hint):
        members = get_args(hint)
        words = dict(_words(one, option) for one in members)
        return Annotated[Union[tuple(_type(one, option) for one in members)], Either(words)]  # noqa: UP007  of a tuple
    return hint


def _words(hint: Any, option: Option) -> tuple[type, str]:
    """A union member's words in a message, and the Python type of its values."""
    if hint is bool:
        return bool, "true, false"
    if hint is int:
        return int, option.number
    assert get_origin(hint) is Literal, hint
    return str, ", ".join(f"`{word}`" for word in get_args(hint))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _without_none(hint: Any) -> Any:
    if not _is_union(hint):
        return hint
    return Union[tuple(one for one in get_args(hint) if one is not type(None))]  # noqa: UP007  of a tuple
