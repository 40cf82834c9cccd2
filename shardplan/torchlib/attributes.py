"""Divides the numbers of heads and the split sizes that a module reads from itself or from its config."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


class DividedConfig:
    """A config as one module sees it: some numbers are divided; all else is read from the shared config, later changes too."""

    def __init__(self, config: Any, numbers: dict[str, int | list[int]]):
        self.__dict__["_config"] = config
        self.__dict__.update(numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask before __init__ has run
            raise AttributeError(name)
        return getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


WHOLE = "_shardplan_whole"  # on a module: the original values of its changed attributes


def divide_attributes(module: nn.Module, divide: Iterable[tuple[str, int]]) -> None:
    """Divide integer attributes of this instance, or lists of them. `config.x` divides the number in this instance's
    config, never in the shared config; `lengths.0.1` in a copy of lists and mappings.

    Args:
        divide: names, and the divisor of each.
    """
    for name, by in divide:
        _change(module, name, partial(_share, by=by))


def set_attributes(module: nn.Module, settings: Iterable[tuple[str, int]]) -> None:
    """Set integer attributes of this instance, with the names of `divide_attributes`.

    Args:
        settings: names, and the value of each.
    """
    for name, number in settings:
        _change(module, name, partial(_set, new=number))


def _change(module: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
    first, *path = name.split(".")
    _remember(module, first)
    setattr(module, first, _changed(getattr(module, first), path, change))


def _changed(value: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    first, *others = path
    if isinstance(value, Mapping):
        new: Any = copy.copy(value)
        key = next(key for key in value if str(key) == first)
        new[key] = _changed(value[key], others, change)
        return new
    if isinstance(value, (list, tuple)):
        parts = list(value)
        parts[int(first)] = _changed(parts[int(first)], others, change)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    part = _changed(getattr(value, first), others, change)
    if not isinstance(value, DividedConfig):
        return DividedConfig(value, {first: part})
    value.__dict__[first] = part
    return value


def _remember(module: nn.Module, name: str) -> None:
    module.__dict__.setdefault(WHOLE, {}).setdefault(name, getattr(module, name))


@contextmanager
def whole_attributes(model: nn.Module) -> Iterator[None]:
    """While active, attributes that were divided or set have the unsharded model's values."""
    changed = [(module, module.__dict__[WHOLE]) for module in model.modules() if WHOLE in module.__dict__]
    parts = [{name: getattr(module, name) for name in whole} for module, whole in changed]
    for module, whole in changed:
        for name, value in whole.items():
            setattr(module, name, value)
    try:
        yield
    finally:
        for (module, _), part in zip(changed, parts, strict=True):
            for name, value in part.items():
                setattr(module, name, value)


def _share(number: Any, by: int) -> Any:
    if isinstance(number, (list, tuple)):
        return [_share(one, by) for one in number]
    assert isinstance(number, int) and number % by == 0, (number, by)
    return number // by


def _set(number: Any, new: int) -> int:
    assert isinstance(number, int), number
    return new


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns a parameter of an adapted layer, and its name there (`lora_A.default.weight`)."""
    if "." not in name:
        return module, name
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
