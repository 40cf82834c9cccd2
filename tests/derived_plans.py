"""What tests ask of plans that `init` derives."""

from __future__ import annotations

from typing import Any

from torch import nn

import shardplan


def meets(rule: Any, wanted: Any) -> bool:
    """Whether a rule is a style, or has the options of a mapping."""
    if not isinstance(wanted, dict):
        return bool(rule == wanted)
    return isinstance(rule, dict) and all(rule.get(option) == value for option, value in wanted.items())


def against_overlay(model: nn.Module, inputs: Any) -> str:
    """The reason for which `init` finds no overlay: the first note of SP531, its only error."""
    made = shardplan.init_plan(shardplan.Model(model, inputs=inputs), sequence_parallel=True)
    assert "sequence_parallel" not in made.document
    (found,) = [one for one in made.diagnostics if one.is_error]
    assert found.code == "SP531"
    return found.notes[0]
