"""The proof in real processes: from Python, from the command line, and compared with the simulation. And our styles in
torch's own `parallelize_module`."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import jsonschema
import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from training_runs import ADAMW

import shardplan
from shardplan.cli.main import main
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.report.report_schema import report_schema

WRONG = {
    "version": "1",
    "extends": "qwen3",
    "tensor_parallel": {"model.layers.*.self_attn.{q,k}_norm": "replicate"},
}


@pytest.mark.slow
def test_verify_with_fsdp2():
    report = shardplan.verify("qwen3", "auto", {"tp": 2, "dp_shard": 2}, sequence_parallel=True, processes=True)
    assert report.proven and report.proof.processes
    assert {row.kind for row in report.proof.rows} == {"output", "gradient", "buffer"}
    assert report.proof.worst.error <= 1e-5


READING = {
    "version": "1",
    "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
    "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]},
}


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_that_the_code_of_the_block_reads(processes: bool):
    """A matrix of a module below it, split; under FSDP2 too."""
    model = shardplan.Model("tests.case_models:reading_blocks", inputs="tests.case_models:features")
    report = shardplan.verify(model, READING, {"tp": 2, "dp_shard": 1 + processes}, processes=processes)
    assert report.proven and report.proof.variants[0].sharded


@pytest.mark.slow
def test_the_simulation_and_real_processes_agree():
    for plan, ok in (("qwen3", True), (WRONG, False)):
        simulated = shardplan.verify("qwen3", plan, {"tp": 2}, sequence_parallel=False)
        real = shardplan.verify("qwen3", plan, {"tp": 2}, sequence_parallel=False, processes=True)
        verdicts = [{row.name: row.verdict for row in report.proof.rows} for report in (simulated, real)]
        assert verdicts[0] == verdicts[1]
        assert simulated.ok is real.ok is ok
        differ = {name for name, verdict in verdicts[0].items() if verdict == "differs"}
        assert differ == set() if ok else all("_norm" in name for name in differ) and differ


@pytest.mark.slow
def test_verify_processes_from_the_command_line():
    out = io.StringIO()
    arguments = ["verify", "llama", "llama", "--tp", "2", "--processes", "--no-sequence-parallel", "--json"]
    with contextlib.redirect_stdout(out):
        assert main(arguments) == 0
    report = json.loads(out.getvalue())
    assert "model.layers.0.mlp.down_proj.weight" in out.getvalue() and report


def step_with_torchs_own_function(sequence_parallel: bool) -> tuple[float, dict[str, Tensor]]:
    """One training step of a model that only torch touched."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "tp"))["tp"]
    model = small_model("qwen3", dtype=torch.float64)
    program = shardplan.compile_plan(model, mesh, "auto", sequence_parallel=sequence_parallel)
    parallelize_module(model, mesh, program.parallelize_plan)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return step(model)


def step(model: torch.nn.Module) -> tuple[float, dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    ids = batch(0)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.item(), {name: whole(p).detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "tensor"])
def test_the_styles_work_with_torchs_parallelize_module(sequence_parallel):
    loss, parameters = step(small_model("qwen3", dtype=torch.float64))
    for own_loss, own in on_ranks(4, step_with_torchs_own_function, sequence_parallel):
        assert own_loss == pytest.approx(loss, rel=TOLERANCE[torch.float64])
        for name, value in parameters.items():
            assert relative_error(own[name], value) <= TOLERANCE[torch.float64], name


# A pipeline's schedule: (model, options of verify).
SCHEDULED: dict[str, tuple[str, dict[str, Any]]] = {
    "a tie, tp": ("qwen2", {"tp": 2, "settings": {"tie_word_embeddings": True}}),
    "stages of several laps": ("llama", {"schedule": "interleaved", "tp": 2, "sequence_parallel": True}),
    "a router's loss": ("mixtral", {"settings": {"output_router_logits": True}}),
    "experts over ranks": ("qwen3_moe", {"dp_shard": 2, "ep": 2, "sequence_parallel": False}),
    "state spaces": ("bamba", {"tp": 2, "sequence_parallel": False}),
    "values of each layer": ("gemma4_text", {"micro_batches": 2}),
    "integers that are carried": ("hy_v4", {}),
    "images that are carried, in texts without": ("gemma3", {}),
    "packed parameters": ("gpt2", {"tp": 2, "settings": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_is_proven_of(name: str):
    model, options = SCHEDULED[name]
    options = dict(options)
    named = shardplan.Model(model, options.pop("settings", None))
    mesh = {"pp": 2, **{axis: options.pop(axis) for axis in ("tp", "dp_shard", "ep") if axis in options}}
    report = shardplan.verify(named, "auto", mesh, processes=True, **options)
    assert report.proven and report.proof.processes and report.proof.pipeline is not None
    for proof in report.proof.variants:
        assert proof.ok and proof.schedule == options.get("schedule", "1f1b") and not proof.unproven
        assert {row.name for row in proof.rows if row.kind == "output"} == {"loss", "loss of an evaluation"}
        assert len([row for row in proof.rows if row.kind == "gradient"]) > 15


@pytest.mark.slow
def test_a_schedule_from_the_command_line(capfd: pytest.CaptureFixture[str]):
    words = ["verify", "llama", "llama", "--pp", "2", "--dp-shard", "2", "--processes", "--schedule", "interleaved"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    jsonschema.Draft202012Validator(report_schema()).validate(report)
    (proof,) = report["proof"]["variants"]
    assert (proof["schedule"], proof["micro_batches"], report["proof"]["pipeline"]["sizes"]) == (
        "interleaved",
        8,
        [1, 1, 1, 1],
    )
    names = {row["name"] for row in proof["rows"] if row["kind"] == "gradient"}
    assert {"model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "lm_head.weight"} <= names


@pytest.mark.slow
def test_a_wrong_plan_is_refuted_by_a_schedule():
    report = shardplan.verify("qwen3", WRONG, {"tp": 2, "pp": 2}, processes=True, sequence_parallel=False)
    assert not report.ok and report.proof.pipeline is None  # in stages the same is wrong
    differ = {row.name for row in report.proof.rows if row.verdict == "differs"}
    assert differ and all("_norm" in name for name in differ)


def test_a_model_that_processes_cannot_find():
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    plan = {"version": "1", "tensor_parallel": {"up": "colwise", "down": "rowwise"}}
    with pytest.raises(ValueError, match=r"cannot find it: .*Local.* at the top level of a module"):
        shardplan.verify(shardplan.Model(Local(), inputs="tests.case_models:features"), plan, {"tp": 2}, processes=True)


def test_a_model_without_a_loss_of_next_tokens():
    """Its outputs are, each multiplied with fixed numbers; and the plan has the backend whose units FSDP2 wraps."""
    plan = {**READING, "pipeline_parallel": {"layers": "layers.*"}}
    model = shardplan.Model("tests.case_models:reading_blocks", inputs="tests.case_models:features")
    report = shardplan.verify(model, plan, {"pp": 2}, processes=True, micro_batches=3)
    assert report.proven and report.proof.variants[0].micro_batches == 3
    assert "layers.1.down.weight" in {row.name for row in report.proof.variants[0].rows if row.verdict == "equal"}
