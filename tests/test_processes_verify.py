"""The proof in real processes: from Python, from the command line, and beside the simulation. And our styles in
torch's own `parallelize_module`."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from training_runs import ADAMW

import shardplan
from shardplan.cli.main import main
from shardplan.proof.compare import TOLERANCE, relative_error

WRONG = {
    "version": "1",
    "extends": "qwen3",
    "tensor_parallel": {"model.layers.*.self_attn.{q,k}_norm": "replicate"},
}


@pytest.mark.slow
def test_verify_with_fsdp2():
    report = shardplan.verify("qwen3", "auto", tp=2, dp_shard=2, sequence_parallel=True, processes=True)
    assert report.ok and report.processes
    assert {row.kind for row in report.rows} == {"output", "gradient", "buffer"}
    assert report.worst.error <= 1e-5


READING = {
    "version": "1",
    "tensor_parallel": {"layers.*.up": "colwise", "layers.*.down": "rowwise"},
    "data_parallel": {"backend": "fsdp2", "units": ["layers.*"]},
}


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_that_the_code_of_the_block_reads(processes: bool):
    """A matrix of a module below it, split; under FSDP2 too."""
    given = {"inputs": "tests.case_models:features", "processes": processes, "dp_shard": 2 if processes else 1}
    report = shardplan.verify("tests.case_models:reading_blocks", READING, tp=2, **given)
    assert report.ok and report.variants[0].sharded


@pytest.mark.slow
def test_the_simulation_and_real_processes_agree():
    for plan, ok in (("qwen3", True), (WRONG, False)):
        simulated = shardplan.verify("qwen3", plan, tp=2, sequence_parallel=False)
        real = shardplan.verify("qwen3", plan, tp=2, sequence_parallel=False, processes=True)
        verdicts = [{row.name: row.verdict for row in report.rows} for report in (simulated, real)]
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
