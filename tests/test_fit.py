"""`fit`: the best configurations on a number of devices."""

import ast
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import shardplan
from shardplan.cli.main import main
from shardplan.core.fits import CHECKPOINTING
from shardplan.cost.devices import read_device
from shardplan.report.fit_script import launch_lines, script_of
from shardplan.report.fit_text import fit_tail, row_text
from shardplan.report.report_schema import report_schema

SEQ = 32
SETTINGS = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "vocab_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
}
SLOW = replace(
    read_device("h100"),
    name="slow",
    memory=30_000_000,
    flops={"bfloat16": 1e12, "float32": 5e11},
    node_gpus=2,
    node_bandwidth=1e10,
    network_bandwidth=1e9,
    efficiency=(0.3, 0.5),
)
STAGED = {
    "version": "1",
    "name": "staged",
    "extends": "llama",
    "pipeline_parallel": {
        "layers": "model.layers.*",
        "first": ["model.embed_tokens"],
        "last": ["model.norm", "lm_head"],
    },
}


@pytest.fixture(scope="module")
def fitted():
    seen = []
    made = shardplan.fit(
        "llama",
        STAGED,
        gpus=2,
        device=SLOW,
        global_batch=4,
        seq_len=SEQ,
        settings=SETTINGS,
        tokens=1e9,
        best=3,
        found_row=seen.append,
    )
    return made, seen


@pytest.mark.slow
def test_the_rows_are_estimates_in_order(fitted):
    made, seen = fitted
    assert set(map(id, made.rows)) == set(map(id, seen)) and len({row.choice.sizes for row in made.rows}) == 3
    bounds = [row.seconds for row in made.rows]
    assert all(a <= b * 1.005 for a, b in itertools.pairwise(bounds))
    for row in made.rows:
        choice = row.choice
        assert choice.micro_batch * choice.micro_batches * choice.sizes.dp_shard * choice.sizes.dp_replicate == 4
        again = shardplan.estimate(
            "llama",
            STAGED,
            choice.sizes,
            seq_len=SEQ,
            settings=SETTINGS,
            micro_batch=choice.micro_batch,
            micro_batches=choice.micro_batches,
            schedule=choice.schedule or "1f1b",
            precision="fp32",
            device=SLOW,
            logits="sharded" if choice.sharded_logits else "plan",
            sequence_parallel=choice.sequence_parallel,
            activation_checkpointing=CHECKPOINTING[choice.checkpointing],
            data_parallel={"mixed_precision": {"param": "bfloat16", "reduce": "float32"}},
        )
        assert again.memory == row.estimate.memory and again.bound == row.estimate.bound
        assert 0 < row.mfu <= 1
    assert made.days(made.rows[0], 0.5) == pytest.approx(2 * made.days(made.rows[0]))


@pytest.mark.slow
def test_the_text_says_what_limits_each_and_why_it_is_first(fitted):
    made, _ = fitted
    texts = [row_text(1, row, color=False) for row in made.rows]
    assert all("limited by: " in text and "MFU" in text for text in texts)
    tail = fit_tail(made)
    assert (
        "1. is before 2.: " in tail
        and "2. is before 3.: " in tail
        and "with 30% to 50% of the bound, as measured" in tail
    )


@pytest.mark.slow
def test_its_script_trains(fitted, tmp_path):
    """As the launch line says, on two gloo processes: of a model in stages, and of a whole one."""
    made, _ = fitted
    plan = tmp_path / "staged.json"
    plan.write_text(json.dumps(STAGED))
    rows = {row.choice.schedule is not None: row for row in made.rows}
    assert rows
    for staged, row in rows.items():
        script = tmp_path / f"train_{staged}.py"
        script.write_text(script_of(row, str(plan), is_type=True, settings=SETTINGS))
        ((_, line),) = launch_lines(row, str(script))
        assert line == f"torchrun --nproc-per-node 2 {script}"
        ran = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *line.split()[1:]],
            env={**os.environ, "STEPS": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert [one.split()[:3] for one in ran.stdout.splitlines() if one.startswith("step")] == [
            ["step", "1", "loss"],
            ["step", "2", "loss"],
        ]


@pytest.mark.slow
def test_json(capsys, tmp_path):
    device = tmp_path / "mini.json"
    fields = ("memory", "flops", "memory_bandwidth", "node_gpus", "node_bandwidth", "network_bandwidth", "efficiency")
    device.write_text(json.dumps({name: getattr(SLOW, name) for name in fields}))
    script = tmp_path / "train.py"
    arguments = ["fit", "llama", "--gpus", "1", "--device", str(device), "--global-batch", "4", "--seq-len", "32"]
    arguments += ["--json", "--script", str(script), *(f"--set={k}={v}" for k, v in SETTINGS.items())]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, report_schema())
    assert report["configurations"][0]["estimate"]["bound"]["fits"]
    ast.parse(script.read_text())


def test_wrong_arguments():
    def of(**options):
        given = {"gpus": 2, "device": SLOW, "global_batch": 4, "seq_len": SEQ, "settings": SETTINGS} | options
        return shardplan.fit("llama", **given)

    with pytest.raises(ValueError, match="gpus must be a positive integer, not 0"):
        of(gpus=0)
    with pytest.raises(ValueError, match="two shares of the bound"):
        of(efficiency=(0.9, 0.1))
    with pytest.raises(ValueError, match="there is no device 'h10'"):
        of(device="h10")


def test_a_global_batch_is_asked_for(capsys):
    assert main(["fit", "llama", "--gpus", "8", "--device", "h100", "--seq-len", "32"]) == 2
    assert "--global-batch" in capsys.readouterr().err
