"""The policies of torch's FSDP2 in configs: reading them from plain values with a table, and writing them as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes of plan sections
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# All that `_target_` may name. No name from a file is imported.
TARGETS: dict[str, type] = {
    f"torch.distributed.fsdp.{policy.__name__}": policy
    for policy in (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)
}


def nearest(word: str, known: Iterable[str]) -> str:
    """The question at the end of a message about a misspelt word; empty where no known word is near."""
    spelled = {one.lower(): one for one in known}
    found = get_close_matches(word.lower(), spelled, n=1)
    return f": did you mean {spelled[found[0]]!r}?" if found else ""


def check_names(given: Mapping[str, Any], known: list[str], what: str) -> None:
    """Raise ValueError for the first unknown name, with the nearest known one."""
    for name in given:
        if name not in known:
            raise ValueError(f"{what} has no {name!r}{nearest(str(name), known)}")


def read_dtype(
    dtype: torch.dtype | str | None, what: str, allowed: tuple[torch.dtype, ...] = DTYPES
) -> torch.dtype | None:
    """The dtype, given as such or by its name.

    Raises:
        ValueError: the dtype is not allowed.
    """
    word = str(dtype).removeprefix("torch.")
    found = getattr(torch, SHORT.get(word, word), None)
    if not (dtype is None or found in allowed):
        *others, last = map(name_of, allowed)
        raise ValueError(f"{what} must be {', '.join(others)} or {last}, not {dtype!r}")
    return None if dtype is None else found


def name_of(dtype: torch.dtype) -> str:
    """The name that plans have for a dtype."""
    return str(dtype).removeprefix("torch.")


def read_policy(value: Any, kinds: tuple[type, ...], what: str) -> Any:
    """The policy, given as such or as a mapping with `_target_`; None stays None.

    Args:
        kinds: the allowed policies.

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
        if not (value is None or value in DTYPES):
            raise ValueError(f"{what}: {name} must be {', '.join(map(str, DTYPES))} or None, not {value!r}")
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
    """A field's value for YAML or JSON: policies with `_target_`, dtypes by name."""
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
