"""The calls that a proof makes: switches of a forward, padding, embeddings, train mode; batches of data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proofs import reduced_model
from torch import Tensor, nn

import shardplan
from shardplan.proof.calls import IGNORED, Calls, calls_of
from shardplan.report import report_text

PLAN = {
    "version": "1",
    "name": "mlp",
    "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden), hidden


class Model(nn.Module):
    """Two blocks. What `way` names is wrong on ranks that have a part of the features, and right in the plain call."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.embed, self.layers, self.way = nn.Embedding(64, 16), nn.ModuleList([Block(), Block()]), way

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        give_features: bool = False,
        noisy: bool | None = None,
        broken: bool = False,
    ) -> Any:
        x = self.embed(input_ids)
        if broken:
            raise RuntimeError("there is no such table")
        for layer in self.layers:
            x, hidden = layer(x)
            if self.way == "plain":
                hidden.register_hook(lambda gradient: gradient / gradient.norm())
        split = hidden.square().mean(-1, keepdim=True).detach()
        if self.way == "mask" and attention_mask is not None:
            x = torch.where(attention_mask[..., None] > 0, x, x * split)
        if self.way == "both" and attention_mask is not None and give_features:
            x = x * split
        if self.way == "raises" and give_features and hidden.shape[-1] != 32:
            raise RuntimeError("a part")
        if self.way == "train" and self.training:
            x = x * split
        if self.way == "eval" and not self.training:
            x = x * split
        if self.way == "draws":
            torch.rand(x.shape)
        if noisy:
            x = x + torch.randn_like(x)
        return (x, x * split) if give_features and self.way == "switch" else (x, x * 2) if give_features else x


def ids(seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))}


def validate(way: str) -> shardplan.Report:
    return shardplan.validate(shardplan.Model(Model(way), inputs=ids), PLAN, {"tp": 2})


ONLY = "only where the model is called with "


@pytest.mark.parametrize(
    ("way", "code", "only"),
    [
        ("switch", "SP420", "give_features=True"),
        ("mask", "SP420", "padding on the right or padding on the left"),
        ("both", "SP420", "give_features=True and padding on the left together"),
        ("raises", "SP422", "give_features=True"),
        ("plain", "SP420", ""),
    ],
)
def test_what_a_call_can_be_told_is_proven(way: str, code: str, only: str) -> None:
    """The layouts are those of the plain call, in which nothing is wrong; the finding says with which call something is."""
    (error,) = validate(way).errors
    assert error.code == code
    assert [note for note in error.notes if note.startswith(ONLY)] == ([ONLY + only] if only else [])
    assert validate("").proven


def test_the_steps_are_in_train_mode() -> None:
    assert not validate("train").ok and validate("eval").proven


def test_the_report_says_what_was_called_and_what_was_not() -> None:
    report = validate("")
    (called,) = report.proof.calls
    assert called.switched == ("give_features=True", "padding on the right", "padding on the left")
    assert called.left_out == {
        "noisy=True": "it draws random numbers",
        "broken=True": "the model raises RuntimeError: there is no such table",
    }
    line = (
        "on tp 2: own [2, 16], 2 steps in train mode, float32; with give_features=True, padding on the right, padding on the left; "
        "not with noisy=True, broken=True"
    )
    assert line in report_text(report, color=False).splitlines()


def test_a_call_that_draws_what_the_plain_call_draws_is_made() -> None:
    """As PhiMoE's router draws among one score: without the call for routers' logits nothing reaches it (SP421)."""
    (called,) = validate("draws").proof.calls
    assert called.switched == ("give_features=True", "padding on the right", "padding on the left")
    assert "it draws random numbers" in called.left_out["noisy=True"]
    assert "output_router_logits=True" in calls("phimoe").second


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("bert-generation", 1), ("megatron-bert", 1), ("t5", 1), ("cpmant", 2), ("mpt", 2)],
    ids=lambda one: str(one),
)
def test_hidden_states_of_other_forms_are_whole(name: str, ranks: int) -> None:
    """Recorded outside of the layers' stack; before the first block, which a partial sum reaches; of encoder and decoder; in a plain tuple,
    and cut by the model's own code (FSDP2 gives the first block a view of its argument)."""
    report = shardplan.validate(name, "auto", {"dp_shard": ranks, "tp": 2}, sequence_parallel=True)
    assert report.proven and any("hidden_states" in row.name for row in report.proof.rows if row.kind == "output")


def calls(name: str) -> Calls:
    return calls_of(reduced_model(name, 2), "text")


def test_switches_are_those_of_the_signature_and_the_configuration() -> None:
    found = calls("mixtral")
    assert {"output_hidden_states=True", "output_router_logits=False"} <= {*found.second} and [*found.third] == [
        "inputs_embeds"
    ]
    assert "every rank computes its own heads only" in found.left_out["output_attentions=True"]
    first, second, third = found.batches()
    assert second["output_hidden_states"] is True and "output_hidden_states" not in first
    assert not second["attention_mask"][0, -1] and not second["attention_mask"][1, 0] and second["attention_mask"][0, 0]
    assert (second["labels"][second["attention_mask"] == 0] == IGNORED).all()
    assert "input_ids" not in third and third["inputs_embeds"].shape == (2, 16, 64)


def test_data_parallel_ranks_have_batches_of_their_own() -> None:
    """Labels of other numbers of tokens, and every second rank a step with one token alone."""
    found = calls("llama")
    one, other = found.batches(0), found.batches(1)
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])
    assert (one[0]["labels"] != IGNORED).sum() != (other[0]["labels"] != IGNORED).sum()
    assert len(one[1]["input_ids"].unique()) > 8 and len(other[1]["input_ids"].unique()) == 1
    assert torch.equal(found.batches()[0]["input_ids"], reduced_model("llama", 2).inputs(0)["input_ids"])


def test_a_cache_is_left_out_where_modules_run_again():
    """A checkpoint's second run would append to the cache again; torch raises there, with a plan and without."""
    plan = {"version": "1", "name": "again", "extends": "llama", "activation_checkpointing": {"mode": "full"}}
    report = shardplan.validate("llama", plan, {"tp": 2})
    assert report.ok, report.diagnostics
    assert report.proof is not None
    (calls,) = report.proof.calls
    assert "use_cache=True" in calls.left_out
    assert "output_hidden_states=True" in calls.switched
