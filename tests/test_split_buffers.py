"""Buffers that are split: each rank reads its share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_ranks
from sampling import sampled
from small_models import batch, small_model, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import TWO_BY_TWO, Recipe, compare
from transformers import FalconH1Config

import shardplan
from shardplan import Model
from shardplan.core.layout import V
from shardplan.core.module_program import ParameterProgram

SCALES = [0.5, 0.7, 1.1, 1.3, 0.9]  # those of a default configuration are all 1, which would hide a wrong share


@pytest.mark.parametrize(
    ("settings", "tp"),
    [
        ({}, 2),  # one group, whose scales both ranks read
        pytest.param({"mamba_n_groups": 2}, 4, marks=pytest.mark.exhaustive),
        pytest.param({"mamba_rms_norm": True, "mamba_n_groups": 4}, 2, marks=pytest.mark.slow),
        pytest.param({"mamba_rms_norm": True, "mamba_n_groups": 2}, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_falcon_h1_is_proven_in_both_variants(settings: dict[str, Any], tp: int) -> None:
    report = shardplan.validate(FalconH1Config(ssm_multipliers=SCALES, **settings), "auto", {"tp": tp})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.parametrize("tp", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_minimax_is_proven_in_both_variants(tp: int) -> None:
    report = shardplan.validate("minimax", "auto", {"tp": tp})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(["falcon_h1", "minimax"], 1))
def test_it_trains_as_the_unsharded_model(name: str) -> None:
    """Losses, norms, clipping, AdamW and every parameter, in real processes, with sequence parallelism."""
    compare(Recipe(name, TWO_BY_TWO, True))


class Decay(nn.Module):
    """Two matrices with a factor of each head, and one of each output feature, between them; some code counts its calls there."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.heads, self.counts = 4, counts
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("decay", torch.linspace(0.1, 0.9, 4)[:, None])
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("x", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.decay.mul_(0.5)
        hidden = (self.up(x) * self.scale).unflatten(-1, (self.heads, -1)) * self.decay
        return self.down(hidden.flatten(-2).tanh())


SPLIT = {"decay": {"dim": 0}, "scale": {"dim": 0, "like": "up"}}


def plan_of(split: dict[str, Any] | None, divide: str = "heads") -> dict[str, Any]:
    shares = [divide, *([split] if split is not None else [])]
    rule: dict[str, Any] = {"style": "input_with_grad_allreduce", "shares": shares}
    rules = {"0": rule, "0.up": "colwise", "0.down": "rowwise"}
    return {"version": "1", "name": "mine", "tensor_parallel": rules}


def checked(split: dict[str, Any] | None, *, counts: bool = False) -> Any:
    return shardplan.validate(
        shardplan.Model(nn.Sequential(Decay(counts=counts)), inputs=inputs), plan_of(split), {"tp": 2}
    )


def inputs(seed: int) -> dict[str, Tensor]:
    return {"input": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(seed))}


def test_evenly_and_as_a_matrix() -> None:
    report = checked(SPLIT)
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.usefixtures("no_repairs")
@pytest.mark.parametrize(
    ("split", "code", "words"),
    [
        (None, "SP408", "must match the size"),  # factors of all heads meet a rank's own
        ({"decay": {"dim": 0}}, "SP408", "must match the size"),
        ({**SPLIT, "missing": {"dim": 0}}, "SP313", "Decay has no buffer and no argument missing"),
        ({**SPLIT, "nothing": {"dim": 0}}, "SP313", "Decay has no buffer and no argument nothing"),
        ({**SPLIT, "decay": {"dim": 1}}, "SP313", "decay has 1 places in dim 1, which tp=2 does not divide"),
        ({**SPLIT, "decay": {"dim": 0, "heads": "4"}}, "SP313", "Decay has no argument decay"),
        ({**SPLIT, "x": {"dim": 0}}, "SP313", "x is a buffer of Decay and an argument of its forward"),
        ({**SPLIT, "decay": {"dim": 2}}, "SP313", "without a dim 2"),
        ({**SPLIT, "scale": {"dim": 0, "like": "down"}}, "SP313", "the output features of down are not split"),
        ({**SPLIT, "scale": {"dim": 0, "like": "over"}}, "SP313", "Decay has no module over with a weight"),
        ({**SPLIT, "decay": {"dim": 0, "like": "up"}}, "SP313", "up has 32 output features, but decay is [4, 1]"),
    ],
)
def test_a_wrong_share_is_a_finding(split: dict[str, Any] | None, code: str, words: str) -> None:
    report = checked(split)
    texts = [" ".join((d.code, d.message, *d.notes)) for d in report.diagnostics]
    assert not report.ok and any(text.startswith(code) and words in text for text in texts), texts


@pytest.mark.slow
def test_scales_of_other_features_are_a_finding() -> None:
    """A rank's features are a part of each of five; an even slice of as many scales are those of others."""
    rule = {
        "style": "local_params",
        "shares": [
            "num_heads",
            "intermediate_size",
            "n_groups",
            {"conv_dim": "intermediate_size + 2 * n_groups * ssm_state_size", "mup_vector": {"dim": 2}},
        ],
        "fused": False,
    }
    plan = {
        "version": "1",
        "name": "mine",
        "extends": "falcon_h1",
        "tensor_parallel": {"model.layers.*.mamba": rule},
    }
    config = FalconH1Config(ssm_multipliers=SCALES, mamba_n_groups=2)
    report = shardplan.validate(config, plan, {"tp": 2}, sequence_parallel=False)
    assert {one.code for one in report.diagnostics if one.is_error} == {"SP404"}, report.diagnostics


def test_a_buffer_that_the_forward_changes_is_refused() -> None:
    """It would change the rank's share of it alone."""
    report = checked(SPLIT, counts=True)
    assert not report.ok and {one.code for one in report.diagnostics if one.is_error} <= {"SP404", "SP420", "SP422"}


def test_the_buffer_itself_stays_whole() -> None:
    model = nn.Sequential(Decay())
    x = inputs(3)["input"]
    torch.manual_seed(0)
    expected = nn.Sequential(Decay())
    for output, compiled, state in on_ranks(2, on_a_rank, x):
        assert torch.allclose(output, expected(x), atol=1e-6) and torch.allclose(compiled, expected(x), atol=1e-6)
        assert state.keys() == model.state_dict().keys()
        assert torch.equal(state["0.decay"], expected[0].decay)


def on_a_rank(x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Decay())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = shardplan.apply_plan(shardplan.Model(model, inputs=inputs), mesh, plan_of(SPLIT))
    output = split(x).detach()
    compiled = torch.compile(split, backend="aot_eager", fullgraph=True)(x).detach()
    return output, compiled, whole_state(split)


def test_the_program_says_what_a_rank_reads() -> None:
    program = shardplan.compile_plan(Model("falcon_h1", settings={"mamba_n_groups": 1}), {"tp": 4}, "auto")
    module = program.modules["model.layers.0.mamba"]
    parts = program.modules["model.layers.0.mamba.in_proj"].parameters[0].parts
    assert module.buffers == (ParameterProgram("mup_vector", V(2), V(2), parts, (1, 1, 4, 4, 1)),)
    assert f"  buffer mup_vector: whole, read as V(2) of parts {'+'.join(map(str, parts))}\n" in program.describe()
    assert module.buffers[0].ranges(sum(parts), 4, 3)[2:4] == ((2 * parts[0], 256), (2 * parts[0] + 256, 256))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "minimax"])
def test_checkpoints_have_whole_buffers(name: str) -> None:
    state = whole_state(small_model(name))
    for saved in on_ranks(2, saved_on_a_rank, name):
        assert saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in state)


def saved_on_a_rank(name: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = shardplan.apply_plan(small_model(name), mesh, "auto", prove=False)
    split(input_ids=batch(1))
    return whole_state(split)
