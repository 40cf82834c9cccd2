"""Tensors in the arguments and results of modules: nests of tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

from torch import Tensor


def leaves(value: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], Tensor]]:
    """The tensors in a nest of tuples, lists, mappings and dataclasses, in order, each with the keys and positions on the way to it. Other
    objects are left out: decoding caches belong to the rank that made them."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for key, item in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from leaves(item, (*path, key))
    elif _is_record(value):
        yield from leaves(_items(value), path)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a nest, in order."""
    return (tensor for _, tensor in leaves(value))


def named_results(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's result with their keys or positions; those in a nest inside of it are counted (`1.0`)."""
    counts = Counter[str]()
    for path, tensor in leaves(tuple(value) if isinstance(value, tuple) else value):  # of a named tuple, positions
        first = str(path[0]) if path else "0"
        yield (first if len(path) < 2 else f"{first}.{counts[first]}"), tensor
        counts[first] += 1


def replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    """The same nest with some tensors replaced, by id."""
    return _changed(value, lambda tensor: new.get(id(tensor), tensor))


def replaced_at(value: Any, new: Mapping[int, Tensor]) -> Any:
    """The same nest with some tensors replaced, by position among all."""
    positions = count()
    return _changed(value, lambda tensor: new.get(next(positions), tensor))


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, Mapping):
        assert isinstance(value, MutableMapping), type(value)
        for key, item in value.items():
            value[key] = _changed(item, change)
        return value
    if isinstance(value, (tuple, list)):
        items = [_changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_record(value):
        value = copy.copy(value)
        for name, item in _items(value).items():
            object.__setattr__(value, name, _changed(item, change))  # works for frozen ones too
    return value


def _is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass. (A ModelOutput is a mapping.)"""
    return is_dataclass(value) and not isinstance(value, type)


def _items(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
