"""Pieces of pipeline stages on one process: copies of tied parameters, as norms count them and as a checkpoint names them; the cut; losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardplan.core.stages import PipelineCut
from shardplan.runtime.apply.model_parts import Parted
from shardplan.runtime.apply.state import keep_optimizer_order
from shardplan.runtime.pipeline.cut_model import absent_of, cut_model
from shardplan.runtime.pipeline.hand_over import Handed, _between
from shardplan.runtime.pipeline.merged_parts import merged
from shardplan.runtime.pipeline.step_loss import divided_by_step
from shardplan.runtime.pipeline.tied_copies import Copies, copies_of
from shardplan.runtime.training import expert_bias
from shardplan.weights import training_state


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
        assert training_state.aliases(pipeline(names, [tie])) == {"head": "embed"}
    assert training_state.aliases(pipeline(["head", "embed"], [("embed", "head")])) == {"embed": "head"}
    assert training_state.aliases(pipeline(names, [("other", "head")])) == {"other": "head"}  # the model names only one


def test_the_state_of_a_copy_is_read_and_put_back() -> None:
    own = pipeline(["embed", "layer", "head"], [("head", "embed")])
    moments = {
        "state": {"head": {"exp_avg": torch.zeros(2), "step": 0}, "layer": {"exp_avg": torch.zeros(2)}},
        "param_groups": [{"params": ["layer", "head"], "lr": 0.1}],
    }
    wanted = training_state.to_load(own, moments)
    assert wanted["state"].keys() == {"embed", "layer"} and wanted["state"]["embed"] is moments["state"]["head"]
    read = {
        "state": {"embed": {"exp_avg": torch.ones(2), "step": 7}, "layer": {"exp_avg": torch.full((2,), 3.0)}},
        "param_groups": [{"params": ["embed", "layer"], "lr": 0.2}, {"params": ["other"], "lr": 0.3}],
    }
    found = training_state.loaded(own, moments, read)
    assert found["state"].keys() == {"head", "layer"}
    assert found["state"]["head"]["exp_avg"].tolist() == [1.0, 1.0] and found["state"]["head"]["step"] == 7
    assert found["param_groups"][0] == {"params": ["embed", "layer", "head"], "lr": 0.2}
    assert found["param_groups"][1] == {"params": ["other"], "lr": 0.3}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TIE = ("embed.weight", "head.weight")
CUT = PipelineCut(("blocks.0", "blocks.1"), (1, 1), ("embed",), ("head",), ties=(TIE,))


def test_a_forward_that_was_put_on_a_block_collects_for_its_owner_in_every_stage() -> None:
    model, seen = Chain(), list[int]()
    for number, block in enumerate(model.blocks):
        block.forward = lambda x, own=block.forward, number=number: seen.append(number) or own(x)
    for number, (part, _) in enumerate(cut_model(model, CUT, [0, 1])):
        part.get_submodule(f"blocks.{number}")(torch.ones(1, 2))
    assert seen == [0, 1]


def test_a_later_stage_reads_a_tied_parameter_under_its_own_name() -> None:
    assert absent_of(Chain(), CUT, 0).tied == {}
    assert absent_of(Chain(), CUT, 1).tied == {TIE[0]: TIE[1]}
    assert {*absent_of(Chain().to("meta"), CUT, 1).modules} == {"blocks.0", "embed"}


def test_the_shapes_of_another_length_follow_from_two() -> None:
    one, two = (Handed((2, length, 8), torch.float32, True) for length in (4, 6))
    assert _between(one, two, 4, 6, 10) == Handed((2, 10, 8), torch.float32, True)
    assert _between(one, Handed((2, 5, 8), torch.float32, True), 4, 6, 5) is None  # no whole number
    assert _between(one, two, 4, 6, 0) is None
    assert _between(one, Handed((2, 6, 8), torch.float32, False), 4, 6, 10) is None


def test_the_stages_of_a_rank_are_one_module_with_the_names_of_the_model() -> None:
    model = Chain()
    found = merged([part for part, _ in cut_model(model, CUT, [0, 1])])
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert dict(found.named_parameters(remove_duplicate=False)).keys() == expected.keys()
    assert all(one is expected[name] for name, one in found.named_parameters(remove_duplicate=False))


def test_a_mean_over_no_tokens_is_zero_of_logits_given_in_either_way() -> None:
    step = SimpleNamespace(counted=False, items=torch.tensor(3))
    loss = divided_by_step(lambda logits, labels, **number: logits.sum() * torch.nan, lambda: step, shifted=False)
    logits, labels = torch.ones(1, 2, 4, requires_grad=True), torch.full((1, 2), -100)
    assert loss(logits, labels).item() == loss(logits=logits, labels=labels).item() == 0.0


def test_what_some_rank_found_is_asked_of_the_ranks_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    parted = Parted()
    parted.group = "ranks"  # type: ignore[assignment]
    monkeypatch.setattr(expert_bias, "of_all", lambda found, group: [group == "ranks"])
    assert expert_bias._on_any_rank(parted, False) and not expert_bias._on_any_rank(nn.Module(), False)


def test_the_order_of_an_optimizer_is_kept_once() -> None:
    optimizer, done = torch.optim.SGD(nn.Linear(2, 2).parameters()), list[str]()
    optimizer.register_state_dict_post_hook = lambda hook: done.append("save")  # type: ignore[method-assign,assignment,return-value]
    optimizer.register_load_state_dict_pre_hook = lambda hook: done.append("load")  # type: ignore[method-assign,assignment,return-value]
    keep_optimizer_order(optimizer, {}, 2)
    keep_optimizer_order(optimizer, {}, 2)
    assert done == ["save", "load"]
