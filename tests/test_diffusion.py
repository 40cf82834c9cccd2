"""Diffusion transformers of diffusers: the built-in plans against their table, on real processes, and in the example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import on_ranks
from scripts import run_script
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardplan import Model, apply_plan, validate, verify
from shardplan.proof.compare import relative_error
from tests.diffusion_models import DIFFUSION
from tests.zoo.diffusion import Row, page, row
from tests.zoo.table import read

ROOT = Path(__file__).parent.parent
TABLE = read(ROOT / "reports" / "diffusion-types.md", Row)
# Texts and images are joined to a row by the model, or in each block: without sequence parallelism.
WHOLE = {"AuraFlowTransformer2DModel", "CogVideoXTransformer3DModel"}
SAMPLE = ("SD3Transformer2DModel",)


def test_every_class_is_in_the_table() -> None:
    assert list(TABLE) == sorted(DIFFUSION)
    assert {text for one in TABLE.values() for text in one.verdicts.values()} == {"right", "none"}
    assert {name for name, one in TABLE.items() if one.verdicts["sp2"] == "none"} == WHOLE
    assert (ROOT / "reports" / "diffusion-types.md").read_text("utf-8") == page([*TABLE.values()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.exhaustive) for name in DIFFUSION]
)
def test_a_class_is_as_the_table_says(name: str) -> None:
    assert row(Row(name)) == TABLE[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "SD3Transformer2DModel",
        "FluxTransformer2DModel",
        pytest.param("DiTTransformer2DModel", marks=pytest.mark.exhaustive),  # below, with dropped labels
    ],
)
def test_a_class_is_proven_on_real_processes(name: str) -> None:
    """Two ranks of tp: every output and every gradient, without and with sequence parallelism."""
    one = f"tests.diffusion_models:NAMED.{name}"
    report = verify(Model(f"{one}.build", inputs=f"{one}.make"), "auto", {"tp": 2}, processes=True)
    assert report.ok and len(report.variants) == 2


def classifier(probability: float) -> nn.Module:
    """A DiT that drops labels."""
    torch.manual_seed(0)
    model = DIFFUSION["DiTTransformer2DModel"].build().train()
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = probability
    return model


def labels_of(model: nn.Module, calls: list[Tensor]) -> None:
    """Note what each table looks up."""
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.embedding_table.register_forward_pre_hook(
            lambda module, args: calls.append(args[0].clone())
        )


def dropped(sequence_parallel: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of two steps, and what was looked up."""
    one, calls = DIFFUSION["DiTTransformer2DModel"], []
    model = classifier(0.5)
    labels_of(model, calls)
    apply_plan(
        Model(model, inputs=one.make),
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        "auto",
        sequence_parallel=sequence_parallel,
        prove=False,
    )
    calls.clear()  # the reduced model has the hooks too
    return [model(**one.make(seed)).sample.detach() for seed in range(2)], calls


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_all_ranks_drop_the_same_labels(sequence_parallel: bool) -> None:
    """Each table draws anew in each call; given the labels that were kept, the outputs are the unsharded model's."""
    one = DIFFUSION["DiTTransformer2DModel"]
    (outputs, calls), (others, other_calls) = on_ranks(2, dropped, sequence_parallel)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(calls, other_calls, strict=True))
    kept = [one.make(step)["class_labels"] for step in range(2) for _ in range(3)]  # two blocks and the last norm
    assert 0 < sum(int((labels != 10).sum()) for labels in calls) < sum(labels.numel() for labels in kept)
    assert all(((labels == own) | (labels == 10)).all() for labels, own in zip(calls, kept, strict=True))
    assert len({tuple(labels.tolist()) for labels in calls[:3]}) > 1
    model, left = classifier(0.5), iter(calls)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.token_drop = lambda labels, force_drop_ids=None: next(left)
    for step in range(2):
        expected = model(**one.make(step)).sample
        assert relative_error(outputs[step], expected) < 1e-5 > relative_error(others[step], expected)


class Noisy(nn.Module):
    """Code that draws where its probability is above 0."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.split, self.drop_rate = split, 0.5
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def drawn(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[:1]) > self.drop_rate)[:, None, None] if self.drop_rate > 0 else x

    def forward(self, x: Tensor) -> Tensor:
        if self.split:
            return self.down(self.drawn(torch.relu(self.up(x))))
        return self.drawn(x)


class Layers(nn.Module):
    def __init__(self, split: bool) -> None:
        super().__init__()
        self.embed, self.noisy = nn.Embedding(32, 16), Noisy(split)
        self.mlp = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mlp[1](torch.relu(self.mlp[0](self.noisy(self.embed(tokens)))))


@pytest.mark.parametrize("split", [False, True])
def test_code_that_draws_next_to_whole_values_draws_common_numbers(split: bool) -> None:
    """Where the same code sees a rank's features, which numbers it needs is not known."""
    rules = {"mlp.0": "colwise", "mlp.1": "rowwise"} | (
        {"noisy.up": "colwise", "noisy.down": "rowwise"} if split else {}
    )
    plan = {"version": "1", "name": "mine", "tensor_parallel": rules}
    report = validate(Layers(split), plan, {"tp": 2})
    assert [d.code for d in report.errors] == (["SP371"] if split else []), report


@pytest.mark.slow
def test_the_example_trains_on_ranks_as_on_one(tmp_path: Path) -> None:
    found = []
    for ranks, *mesh in ((1,), (4, "--tp", "2")):
        run_script(ranks, "examples/diffusion.py", "--steps", "3", *mesh, "--losses", str(tmp_path / "losses"))
        found.append([json.loads(line)["loss"] for line in (tmp_path / "losses").read_text("utf-8").splitlines()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][2] < found[0][0]
