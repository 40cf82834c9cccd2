"""The optimizer state of pipeline stages in the form of the whole model's checkpoint: a tied parameter once, under its name in
`named_parameters()` of the whole model, and the parameter groups of all stages together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardplan.runtime.pipeline import Pipeline
from shardplan.torchlib.gathering import of_all

State = dict[str, Any]


def aliases(pipeline: Pipeline) -> dict[str, str]:
    """Each further name of a tied parameter -> the name that its state has in a checkpoint."""
    place = {name: i for i, name in enumerate(pipeline.names)}
    found: dict[str, str] = {}
    for tie in pipeline.ties:
        first, *others = sorted(tie, key=lambda name: place.get(name, len(place)))
        found |= dict.fromkeys(others, first)
    return found


def to_save(pipeline: Pipeline, moments: State) -> State:
    """This rank's optimizer state for the checkpoint. A collective over pp."""
    other = aliases(pipeline)
    state = {name: value for name, value in moments["state"].items() if name not in other}
    return {**moments, "state": state, "param_groups": _all_groups(pipeline, moments["param_groups"], other)}


def _all_groups(pipeline: Pipeline, groups: list[State], other: dict[str, str]) -> list[State]:
    gathered = of_all(groups, pipeline.group)
    count = max(map(len, gathered))
    made = []
    for i in range(count):
        same = [part[i] for part in gathered if i < len(part)]
        names = dict.fromkeys(name for part in same for name in part["params"] if name not in other)
        made.append({**same[0], "params": list(names)})
    return made


def to_load(pipeline: Pipeline, moments: State) -> State:
    """The state to read for this rank, with the state of a tied copy under the name that the checkpoint has."""
    other = aliases(pipeline)
    state = {name: value for name, value in moments["state"].items() if name not in other}
    for name, value in moments["state"].items():
        if name in other:
            state.setdefault(other[name], value)
    return {**moments, "state": state}


def loaded(pipeline: Pipeline, moments: State, read: State) -> State:
    """The state that was read, under this rank's names.

    Args:
        moments: this rank's, before `to_load`.
        read: what `to_load` returned, filled.
    """
    other = aliases(pipeline)
    state = {
        name: _copied(value, read["state"][other[name]]) if name in other else read["state"][name]
        for name, value in moments["state"].items()
    }
    mine = {name for group in moments["param_groups"] for name in group["params"]}
    groups = [
        {**group, "params": [*group["params"], *(n for n in other if n in mine and other[n] in group["params"])]}
        for group in read["param_groups"]
    ]
    return {**read, "state": state, "param_groups": groups}


def _copied(own: State, read: State) -> State:
    """The values that were read, in this copy's own tensors."""
    for name, value in own.items():
        if isinstance(value, Tensor) and value is not read[name]:
            value.copy_(read[name])
    return {name: value if isinstance(value, Tensor) else read[name] for name, value in own.items()}
