"""The numbers of published checkpoints, and combinations of switches that checkpoints are published with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Checkpoint:
    """The numbers of a published checkpoint's configuration.

    Args:
        name: of the checkpoint.
        model_type: of transformers.
        fields: of the configuration, as the source has them; the others are the defaults of the type.
        source: the public place that the numbers are from.
    """

    name: str
    model_type: str
    fields: dict[str, Any]
    source: str


@dataclass(frozen=True)
class Combination:
    """Switches that are published together, without the sizes of a checkpoint.

    Args:
        model_type: of transformers.
        fields: what differs from the defaults of the type.
        like: the checkpoints that are so, or what is tried.
    """

    model_type: str
    fields: dict[str, Any]
    like: str

    @property
    def name(self) -> str:
        return self.like


def checkpoints() -> list[Checkpoint]:
    """All checkpoints, by family."""
    return [Checkpoint(**row) for file in sorted((DATA / "published").glob("*.json")) for row in _rows(file)]


def combinations() -> list[Combination]:
    """All combinations."""
    return [Combination(**row) for row in _rows(DATA / "variants" / "combinations.json")]


def gaps() -> dict[str, str]:
    """Configurations that `auto` refuses without naming the switch, "TYPE NAME" -> why."""
    return json.loads((DATA / "variants" / "gaps.json").read_text("utf-8"))


def _rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text("utf-8"))
