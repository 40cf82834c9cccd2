"""Arguments that are split, each rank reading its share, and fused matrices of several blocks of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from safetensors.torch import load_file
from small_models import batch, small_model, whole_state
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import TWO_BY_TWO, Recipe, compare

import shardplan
from shardplan import Model
from shardplan.core.module_program import ArgumentSlice

ALIBI = {"alibi": True, "num_attention_heads": 64, "hidden_size": 4096}
ATTENTION = {"mpt": "transformer.blocks.*.attn", "bloom": "transformer.h.*.self_attention"}


@pytest.mark.parametrize(
    ("name", "settings", "tp"),
    [
        ("mpt", {}, 2),
        pytest.param(
            "mpt", {"n_heads": 14, "d_model": 448}, 7, marks=pytest.mark.slow
        ),  # slopes are not powers of one base
        ("bloom", {}, 4),
        ("codegen", {}, 2),
        pytest.param("codegen", {}, 4, marks=pytest.mark.slow),
        pytest.param("codegen", {"n_head": 24, "n_embd": 6144}, 6, marks=pytest.mark.exhaustive),
        pytest.param("falcon", ALIBI, 2, marks=pytest.mark.slow),
        pytest.param("falcon", {**ALIBI, "multi_query": False}, 4, marks=pytest.mark.slow),
        pytest.param(
            "falcon", {**ALIBI, "new_decoder_architecture": True, "num_kv_heads": 8}, 4, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_it_is_proven_in_both_variants(name: str, settings: dict[str, Any], tp: int) -> None:
    report = shardplan.validate(Model(name, settings=settings), "auto", {"tp": tp})
    assert report.ok and report.proof is not None and report.proof.ok, report.diagnostics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bloom", {"tp": 4}),
        ("codegen", TWO_BY_TWO),
        pytest.param("mpt", TWO_BY_TWO, marks=pytest.mark.exhaustive),
        pytest.param("falcon", TWO_BY_TWO, marks=pytest.mark.exhaustive),
    ],
)
def test_it_trains_as_the_unsharded_model(name: str, sizes: dict[str, int]) -> None:
    """Losses, norms, clipping, AdamW and every parameter, in real processes, with sequence parallelism."""
    compare(Recipe(name, sizes, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bloom", "codegen", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("mpt", "falcon"))]
)
def test_decoding_and_checkpoints(name: str, tmp_path: Path) -> None:
    """What is generated with a cache is the unsharded model's, and so are the names, shapes and values of what is saved."""
    model, prompt = small_model(name, noise=0.1).eval(), batch(1, length=8)
    expected, state = _generated(model, prompt), whole_state(model)
    for tokens, saved in on_ranks(2, on_a_rank, name, prompt, str(tmp_path)):
        assert torch.equal(tokens, expected)
        assert saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in state)
    written = load_file(tmp_path / "model.safetensors")
    assert written and all(torch.equal(tensor, state[key]) for key, tensor in written.items())


def on_a_rank(name: str, prompt: Tensor, folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shardplan.apply_plan(small_model(name, noise=0.1).eval(), mesh, "auto", prove=False)
    shardplan.save_checkpoint(model, folder)
    return _generated(model, prompt), whole_state(model)


def _generated(model: nn.Module, prompt: Tensor) -> Tensor:
    tokens = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert isinstance(tokens, Tensor)
    return tokens


def test_the_program_says_what_a_rank_reads() -> None:
    program = shardplan.compile_plan("bloom", {"tp": 2}, "auto")
    module = program.modules["transformer.h.0.self_attention"]
    assert module.slices == (ArgumentSlice("alibi", 0, 8),)
    assert "  in alibi: R -> V(0) of each 8\n" in program.describe()


@pytest.mark.usefixtures("no_repairs")
@pytest.mark.parametrize(
    ("name", "option", "code", "words"),
    [
        ("mpt", {}, "SP408", "must match the size"),  # biases of all heads meet a rank's own
        ("mpt", {"position_bias": {"dim": 1}}, "SP408", "by 1 heads over 2 ranks"),
        ("mpt", {"position_bias": {"dim": 3}}, "SP408", "splits dim 3 of 'position_bias'"),
        ("mpt", {"positions": {"dim": 0}}, "SP408", "moves the argument 'positions', which is missing in this call"),
        ("mpt", {"n_heads": {"dim": 0}}, "SP313", "n_heads has two shares"),
        ("bloom", {"alibi": {"dim": 0}}, "SP404", "baddbmm"),  # other sequences' biases, of the right shape
        ("bloom", {"alibi": {"dim": 0, "heads": "num_heads"}}, "SP313", "num_heads"),
        ("bloom", {"alibi": {"dim": 0, "heads": 7}}, "SP313", "alibi has 7 heads, which tp=2 does not divide"),
        (
            "bloom",
            {"alibi": {"dim": 0, "heads": "n_head"}, "residual": {"dim": 2}},
            "SP402",
            "partial gradient (R)",
        ),  # its gradient is complete
    ],
)
def test_a_wrong_share_is_a_finding(name: str, option: dict[str, Any], code: str, words: str) -> None:
    rule: dict[str, Any] = {
        "style": "input_with_grad_allreduce",
        "shares": [{"mpt": "n_heads", "bloom": "num_heads"}[name], *([option] if option else [])],
    }
    plan = {"version": "1", "name": "mine", "extends": name, "tensor_parallel": {ATTENTION[name]: rule}}
    report = shardplan.validate(name, plan, {"tp": 2}, sequence_parallel=False)
    assert not report.ok
    texts = [" ".join((d.code, d.message, *d.notes)) for d in report.diagnostics]
    assert any(text.startswith(code) and words in text for text in texts), texts


def test_a_reduced_model_has_as_many_heads_as_the_plan_needs() -> None:
    """A quarter of CodeGen's heads is a block; each rank has two heads of each, as the reduced model has two of each kind else."""
    from shardplan.compiler.layout import ModelLayouts
    from shardplan.model import find_model

    layouts = ModelLayouts(find_model("codegen"), 2)
    assert layouts.reduced_model.config.n_head == 4
    assert layouts.check(shardplan.load_plan("codegen").file).ok
    assert layouts.reduced_model.config.n_head == 8


@pytest.mark.slow
def test_so_has_the_one_of_eight_ranks() -> None:
    assert shardplan.validate("codegen", "codegen_gathered", {"tp": 8}).ok
