"""Tensors in the arguments and results of modules: nests of tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest of tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif _is_record(value):
        yield from tensors_in(_items(value))


def named_results(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's result with their keys or positions."""
    if isinstance(value, Tensor):
        yield "0", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            for i, tensor in enumerate(tensors_in(item)):
                yield (str(key) if isinstance(item, Tensor) else f"{key}.{i}"), tensor
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            for i, tensor in enumerate(tensors_in(item)):
                yield (str(position) if isinstance(item, Tensor) else f"{position}.{i}"), tensor
    elif _is_record(value):
        yield from named_results(_items(value))


def replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    """The same nest with some tensors replaced, by id."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if type(value) is dict:
        return {key: replaced(item, new) for key, item in value.items()}
    if isinstance(value, Mapping):
        assert isinstance(value, MutableMapping), type(value)
        for key, item in value.items():
            value[key] = replaced(item, new)
        return value
    if isinstance(value, (tuple, list)):
        items = [replaced(item, new) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_record(value):
        value = copy.copy(value)
        for name, item in _items(value).items():
            object.__setattr__(value, name, replaced(item, new))  # works for frozen ones too
    return value


def _is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass. (A ModelOutput is a mapping.)"""
    return is_dataclass(value) and not isinstance(value, type)


def _items(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
