"""Devices as data: those that come with the package, and a user's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardplan.core.estimates import Device
from shardplan.core.suggest import closest

OPTIONAL = ("source", "efficiency")
FILE = Path(__file__).with_name("devices.json")


def known_devices() -> dict[str, Device]:
    """The devices that come with the package, by name."""
    return {name: _device(name, data, FILE.name) for name, data in json.loads(FILE.read_text("utf-8")).items()}


def read_device(word: str) -> Device:
    """The device that a word names: a known one, or a JSON file (a word with a path separator or a .json ending) with the
    fields of `Device`, the name aside.

    Raises:
        ValueError: no such device or file, or a file that does not describe one.
    """
    path = Path(word)
    if path.suffix != ".json" and len(path.parts) < 2:
        known = known_devices()
        if word not in known:
            near = closest(word, known)
            hint = f"did you mean {near}?" if near else f"the known devices are {', '.join(known)}."
            raise ValueError(f"there is no device {word!r}: {hint} Describe another device in a JSON file")
        return known[word]
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {word}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{word} is not JSON: {error}") from None
    return _device(path.stem, data, word)


def _device(name: str, data: Any, file: str) -> Device:
    if not isinstance(data, Mapping):
        raise ValueError(f"{file}: a device is an object with the fields {', '.join(_FIELDS)}")
    missing = [field for field in _FIELDS if field not in data and field not in OPTIONAL]
    unknown = [field for field in data if field not in _FIELDS]
    if missing or unknown:
        problem = f"lacks {missing[0]!r}" if missing else f"has the unknown field {unknown[0]!r}"
        raise ValueError(f"{file}: the device {problem}; its fields are {', '.join(_FIELDS)}")
    speeds = data["flops"]
    if not isinstance(speeds, Mapping) or not speeds or not all(map(_is_positive, speeds.values())):
        raise ValueError(f"{file}: flops must be an object: dtype -> operations per second")
    for field in _FIELDS:
        if field not in ("flops", *OPTIONAL) and not _is_positive(data[field]):
            raise ValueError(f"{file}: {field} must be a positive number, not {data[field]!r}")
    efficiency = data.get("efficiency")
    if efficiency is not None and not (
        isinstance(efficiency, list) and len(efficiency) == 2 and all(map(_is_positive, efficiency))
    ):
        raise ValueError(f"{file}: efficiency must be two shares of the bound's speed, not {efficiency!r}")
    return Device(name, **{**data, "efficiency": tuple(efficiency) if efficiency is not None else None})


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


_FIELDS = tuple(field.name for field in fields(Device) if field.name != "name")
