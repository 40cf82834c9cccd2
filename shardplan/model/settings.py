"""Settings that the user changes in a model's configuration (`--set attn_pdrop=0`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardplan.core.diagnostics import Code, Diagnostic, PlanError

from .config_numbers import config_value
from .model_findings import did_you_mean, finding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNKNOWN_SETTING = Code("SP510")

Setting = int | float | bool | str | None


def parse_setting(text: str) -> tuple[str, Setting]:
    """`name=value` as a pair; the value is a JSON scalar.

    Raises:
        ValueError: no `=`, no name, or a value that is not a JSON number, true, false, null or string.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is not of the form name=value")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = [value]
    if isinstance(parsed, (list, dict)):
        raise ValueError(f"the value of {name.strip()} must be a number, true, false, null or a quoted string: {value}")
    return name.strip(), parsed


def with_settings(
    data: Mapping[str, Any], config: PreTrainedConfig, settings: Mapping[str, Setting], shown: str
) -> dict[str, Any]:
    """The configuration's JSON object with the settings, under the names that the configuration
    stores them with.

    Args:
        data: the data of the configuration; it is not changed.
        config: the configuration made from the data, which knows the names.
        settings: names, dotted for nested configurations -> values.
        shown: the model's name for messages.

    Raises:
        PlanError: SP510, one finding for each unknown name.
    """
    result = copy.deepcopy(dict(data))
    unknown: list[Diagnostic] = []
    for name, value in settings.items():
        *path, last = name.split(".")
        at = _config_at(config, path)
        if at is None or last not in set(_settable(at)):
            known = {known for known, _ in settable(config)}
            unknown.append(
                finding(
                    UNKNOWN_SETTING,
                    f"the configuration of {shown} has no {name}",
                    help=did_you_mean(name, known),
                )
            )
            continue
        node = result
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        stored = at.attribute_map.get(last, last)
        if stored != last:
            node.pop(last, None)
        node[stored] = value
    if unknown:
        raise PlanError(tuple(unknown))
    return result


def _config_at(config: PreTrainedConfig, path: Sequence[str]) -> PreTrainedConfig | None:
    for part in path:
        if part not in _nested(config):
            return None
        config = getattr(config, part)
    return config


def settable(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that can be changed, by its dotted name, with its value."""
    for name in _settable(config):
        yield f"{prefix}{name}", config_value(config, name)
    for name in _nested(config):
        yield from settable(getattr(config, name), f"{prefix}{name}.")


def _nested(config: PreTrainedConfig) -> tuple[str, ...]:
    return tuple(name for name, value in vars(config).items() if hasattr(value, "attribute_map"))


def _settable(config: PreTrainedConfig) -> Iterator[str]:
    """The names of scalars that the class declares or the instance has, and the other spellings of these names."""
    declared = {field.name for field in fields(config)} | set(vars(config))
    names = {name for name in declared if not name.startswith("_")}
    aliases = {alias for alias, stored in config.attribute_map.items() if stored in names}
    for name in sorted(names | aliases):
        if isinstance(config_value(config, name), (int, float, str, type(None))):
            yield name
