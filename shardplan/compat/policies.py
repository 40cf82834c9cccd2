"""The policies of torch's FSDP2 in configs: read from plain values, by a table, and written as such."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardplan.core.dtypes import DTYPES, dtype_name
from shardplan.core.suggest import closest

# All that `_target_` may name. Nothing is imported by a name that a file says.
TARGETS: dict[str, type] = {
    f"torch.distributed.fsdp.{policy.__name__}": policy
    for policy in (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)
}


def check_names(given: Mapping[str, Any], known: Mapping[str, Any] | list[str], what: str) -> None:
    """Raise ValueError for the first name that is not known, with the nearest."""
    for name in given:
        if name not in known:
            near = closest(str(name), known)
            raise ValueError(f"{what} has no {name!r}" + (f": did you mean {near!r}?" if near else ""))


def read_dtype(dtype: torch.dtype | str | None, what: str, allowed: tuple[str, ...] = DTYPES) -> torch.dtype | None:
    """A dtype, also by its name.

    Raises:
        ValueError: none of those that are allowed.
    """
    return None if dtype is None else getattr(torch, dtype_name(dtype, what, allowed))


def name_of(dtype: torch.dtype) -> str:
    """The name that plans have for a dtype."""
    return str(dtype).removeprefix("torch.")


def read_policy(value: Any, kinds: tuple[type, ...], what: str) -> Any:
    """A policy, also as a mapping with `_target_`; None stays None.

    Args:
        kinds: the policies that may stand there.

    Raises:
        ValueError: a `_target_` that is not in the table, or a field that the policy does not have.
        TypeError: something else.
    """
    if isinstance(value, Mapping):
        value = _from_mapping(value, what)
    if isinstance(value, type) and issubclass(value, kinds):
        raise TypeError(f"{what} must be an instance of {value.__name__}, not the class: write {value.__name__}()")
    if isinstance(value, MixedPrecisionPolicy):
        _check_dtypes(value, what)
    if value is not None and not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{what} must be a {names} or None, not {value!r}")
    return value


def _check_dtypes(policy: MixedPrecisionPolicy, what: str) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        value = getattr(policy, name)
        if not (value is None or (isinstance(value, torch.dtype) and name_of(value) in DTYPES)):
            raise ValueError(
                f"{what}: {name} must be {', '.join(f'torch.{dtype}' for dtype in DTYPES)} or None, not {value!r}"
            )
    if not isinstance(policy.cast_forward_inputs, bool):
        raise ValueError(f"{what}: cast_forward_inputs must be True or False, not {policy.cast_forward_inputs!r}")


def _from_mapping(value: Mapping[str, Any], what: str) -> Any:
    options = dict(value)
    target = options.pop("_target_", None)
    if target not in TARGETS:
        raise ValueError(f"{what}: `_target_` must be one of {', '.join(TARGETS)}, not {target!r}")
    policy = TARGETS[target]
    check_names(options, [field.name for field in fields(policy)], f"{what}: {policy.__name__}")
    for name in options:
        if name.endswith("_dtype"):
            options[name] = read_dtype(options[name], f"{what}: {name}")
    return policy(**options)


def plain(value: Any) -> Any:
    """A field's value as YAML and JSON have it: policies with `_target_`, dtypes by name."""
    if isinstance(value, torch.dtype):
        return name_of(value)
    if type(value) in TARGETS.values():
        target = next(name for name, policy in TARGETS.items() if policy is type(value))
        return {"_target_": target} | {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return list(value)
    return value
