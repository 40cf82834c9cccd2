"""Tied parameters that stages have copies of, as norms count them and as a checkpoint names them, on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardplan.runtime.pipeline.tied_copies import Copies, copies_of
from shardplan.weights import stage_moments


class Part(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(2)))


def test_a_value_counts_once_where_a_rank_has_both_ends() -> None:
    first, last = Part("embed"), Part("head")
    (copies,) = copies_of([("head", "embed")], {"embed": 0, "head": 3}, {0: 0, 3: 1}, {0: first, 3: last})
    assert list(copies.names) == [0, 3] and copies.later == (last.head,)
    copies.share()
    assert last.head is first.embed and copies.later == ()


def test_a_later_stage_alone_counts_nothing() -> None:
    last = Part("head")
    copies = Copies({0: "embed", 3: "head"}, {0: 0, 3: 1}, {3: last})
    assert copies.later == (last.head,)
    assert Copies({0: "embed", 3: "head"}, {0: 0, 3: 1}, {0: Part("embed")}).later == ()


def pipeline(names: list[str], ties: list[tuple[str, ...]]) -> Any:
    return SimpleNamespace(names=names, ties=ties)


def test_a_checkpoint_has_the_name_that_the_model_gives_first() -> None:
    names = ["embed", "layer", "head"]
    for tie in (("embed", "head"), ("head", "embed")):
        assert stage_moments.aliases(pipeline(names, [tie])) == {"head": "embed"}
    assert stage_moments.aliases(pipeline(["head", "embed"], [("embed", "head")])) == {"embed": "head"}
    assert stage_moments.aliases(pipeline(names, [("other", "head")])) == {"other": "head"}  # the model names one alone


def test_the_state_of_a_copy_is_read_and_put_back() -> None:
    own = pipeline(["embed", "layer", "head"], [("head", "embed")])
    moments = {
        "state": {"head": {"exp_avg": torch.zeros(2), "step": 0}, "layer": {"exp_avg": torch.zeros(2)}},
        "param_groups": [{"params": ["layer", "head"], "lr": 0.1}],
    }
    wanted = stage_moments.to_load(own, moments)
    assert wanted["state"].keys() == {"embed", "layer"} and wanted["state"]["embed"] is moments["state"]["head"]
    read = {
        "state": {"embed": {"exp_avg": torch.ones(2), "step": 7}, "layer": {"exp_avg": torch.full((2,), 3.0)}},
        "param_groups": [{"params": ["embed", "layer"], "lr": 0.2}, {"params": ["other"], "lr": 0.3}],
    }
    found = stage_moments.loaded(own, moments, read)
    assert found["state"].keys() == {"head", "layer"}
    assert found["state"]["head"]["exp_avg"].tolist() == [1.0, 1.0] and found["state"]["head"]["step"] == 7
    assert found["param_groups"][0] == {"params": ["embed", "layer", "head"], "lr": 0.2}
    assert found["param_groups"][1] == {"params": ["other"], "lr": 0.3}
