"""All configurations of a type, and a sample of those of all types."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .outcome import Outcome, outcome
from .published import DATA, Checkpoint, Combination, checkpoints, combinations, gaps
from .switches import BASES, candidates, switches

MOST, LIMIT = 60, 8 * 60.0  # configurations of a type, and seconds of processor time


@dataclass(frozen=True)
class Trial:
    """A configuration to try.

    Args:
        model_type: of transformers.
        name: unique in its type.
        settings: of the configuration.
        switches: the fields that a refusal has to name one of.
    """

    model_type: str
    name: str
    settings: dict[str, Any]
    switches: tuple[str, ...]


def planned() -> list[str]:
    """The model types that have a built-in plan, by the table of model types."""
    rows = json.loads((DATA.parent.parent / "reports" / "model-types.json").read_text("utf-8"))
    return [row["name"] for row in rows if row["verdicts"]]


def published() -> list[Checkpoint | Combination]:
    """What is published."""
    return [*checkpoints(), *combinations()]


def sample(count: int, seed: int) -> list[Trial]:
    """So many configurations of all: half of them published ones, half of them single switches."""
    chosen = random.Random(seed)
    known = [Trial(one.model_type, one.name, one.fields, tuple(one.fields)) for one in published()]
    single = [
        Trial(name, text, {**BASES.get(name, {}), **change}, tuple(change))
        for name in planned()
        for text, change in candidates(name).items()
    ]
    return chosen.sample(known, count // 2) + chosen.sample(single, count - count // 2)


def tried(model_type: str) -> list[Outcome]:
    """Every configuration of a type: published ones, then switches, as many as the limits allow."""
    configurations = {one.name: (one.fields, one.fields) for one in published() if one.model_type == model_type}
    for name, change in switches(model_type).items():
        configurations[name] = ({**BASES.get(model_type, {}), **change}, change)
    found: list[Outcome] = []
    began = time.process_time()
    for name, (settings, changed) in list(configurations.items())[:MOST]:
        if time.process_time() - began > LIMIT:
            break
        found.append(outcome(model_type, name, settings, changed))
    return found


def is_listed(one: Outcome) -> bool:
    """Whether a gap is in the list: by its name, by one change of several, or as all configurations of its type ("TYPE *")."""
    return any(f"{one.model_type} {name}" in gaps() for name in (one.name, *one.name.split(", "), "*"))


def unlisted(found: Sequence[Outcome]) -> list[str]:
    """What is wrong: a gap that is not listed, a listed one that is none any more, a configuration that is accepted unproven."""
    listed = gaps()
    new = [f"{one.key}: {one.about}" for one in found if one.verdict == "gap" and not is_listed(one)]
    closed = [
        f"{one.key}: listed as a gap, and it is none" for one in found if one.key in listed and one.verdict != "gap"
    ]
    return new + closed + [f"{one.key}: accepted without a proof" for one in found if one.verdict == "wrong"]
