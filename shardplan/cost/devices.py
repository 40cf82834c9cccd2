"""Devices as data: those in the package, and those in a user's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardplan.core.estimates import Device
from shardplan.core.suggest import closest
from shardplan.core.user_files import CannotRead, read_json

OPTIONAL = ("source", "efficiency")
MOST_BYTES = 2**20  # of a device file
FILE = Path(__file__).with_name("devices.json")


def known_devices() -> dict[str, Device]:
    """The devices in the package, by name."""
    return {name: _device(name, data, FILE.name) for name, data in json.loads(FILE.read_text("utf-8")).items()}


def read_device(word: str) -> Device:
    """The device that a word names: a known one, or a JSON file (a word with a path separator, or ending in .json) with the
    fields of `Device` except the name.

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
        data = read_json(path, MOST_BYTES)
    except CannotRead as error:
        raise ValueError(f"{word} {error.reason}") from None
    return _device(path.stem, data, word)


def _device(name: str, data: Any, file: str) -> Device:
    if not isinstance(data, Mapping):
        raise ValueError(f"{file}: a device is an object with the fields {', '.join(_FIELDS)}")
    missing = [field for field in _FIELDS if field not in data and field not in OPTIONAL]
    unknown = [field for field in data if field not in _FIELDS]
    if missing or unknown:
        problem = f"lacks {missing[0]!r}" if missing else f"has the unknown field {unknown[0]!r}"
        raise ValueError(f"{file}: the device {problem}; its fields are {', '.join(_FIELDS)}")
    efficiency = data.get("efficiency")
    if isinstance(efficiency, list):
        efficiency = tuple(efficiency)
    try:
        return Device(name, **{**data, "efficiency": efficiency})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


_FIELDS = tuple(field.name for field in fields(Device) if field.name != "name")
