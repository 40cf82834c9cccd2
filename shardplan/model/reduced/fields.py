"""The meaning of the fields of model configurations, by their usual names: plans/numbers.toml, one table for all architectures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from shardplan.core.data_files import data_folder

Role = str  # a table of plans/numbers.toml
Roles = Callable[[str], Role | None]

TABLE: Mapping[Role, Mapping[str, Any]] = tomllib.loads((data_folder("plans") / "numbers.toml").read_text("utf-8"))

# Ids with a meaning other than text: never drawn as text tokens.
SPECIAL = re.compile(r".*(image|boi|eoi|boa|eoa|audio|video|vision|speech).*")


@cache
def role(name: str) -> Role | None:
    """The role of a configuration field, or None where it may stay as it is."""
    return next((what for what, of in TABLE.items() if re.fullmatch("|".join(of["names"]), name)), None)
