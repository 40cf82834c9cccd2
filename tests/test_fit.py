"""`fit`: the best configurations on a number of devices."""

import ast
import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import shardplan
from shardplan.api.fit_programs import Programs
from shardplan.cli.main import main
from shardplan.cli.output import Bar
from shardplan.compiler.user_inputs import Model
from shardplan.core.estimates import Bound, Question, TrainingStep
from shardplan.core.fits import CHECKPOINTING, Forecast
from shardplan.core.mesh import MeshSizes
from shardplan.cost.devices import known_devices, read_device
from shardplan.cost.fit_tables import of_context, of_experts
from shardplan.cost.published import forecast_of, published_runs
from shardplan.report.estimate_text import seconds_text
from shardplan.report.fit_script import launch_lines, script_of
from shardplan.report.fit_text import fit_head, fit_tail, row_text, ties, why
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
EXPERTS = {
    **{name: value for name, value in SETTINGS.items() if name != "head_dim"},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}  # tp does not divide it
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
        shardplan.Model("llama", settings=SETTINGS),
        STAGED,
        gpus=2,
        device=SLOW,
        global_batch=4,
        seq_len=SEQ,
        tokens=1e9,
        best=3,
        found_row=seen.append,
    )
    return made, seen


@pytest.mark.slow
def test_the_rows_are_estimates_in_order(fitted):
    made, seen = fitted
    assert set(map(id, made.rows)) == set(map(id, seen)) and len({row.choice.sizes for row in made.rows}) == 3
    for row in made.rows:
        choice = row.choice
        assert choice.micro_batch * choice.micro_batches * choice.sizes.dp_shard * choice.sizes.dp_replicate == 4
        again = shardplan.estimate(
            shardplan.Model("llama", settings=SETTINGS),
            STAGED,
            choice.sizes,
            shardplan.TrainingStep(
                SEQ,
                micro_batch=choice.micro_batch,
                precision="fp32",
                micro_batches=choice.micro_batches,
                schedule=choice.schedule or "1f1b",
            ),
            device=SLOW,
            logits="sharded" if choice.sharded_logits else "plan",
            sequence_parallel=choice.sequence_parallel,
            activation_checkpointing=CHECKPOINTING[choice.checkpointing],
            data_parallel={"mixed_precision": {"param": "bfloat16", "reduce": "float32"}},
        )
        assert again.memory == row.estimate.memory and again.bound == row.estimate.bound
        products = 6 * (
            6 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 64 * 96
        )  # forward and backward, without attention
        assert products < row.flops_of_a_token < products + 6 * 3.5 * 4 * SEQ * 64
        assert row.mfu == pytest.approx(row.flops_of_a_token * again.tokens_per_second / 1e12) and row.mfu <= 1
        assert made.days(row) == pytest.approx(1e9 / (2 * again.tokens_per_second) / 86_400)
    assert made.days(made.rows[0], 0.5) == pytest.approx(2 * made.days(made.rows[0]))


def longer(row, times):
    """A row whose bound is so many times as long."""
    bound = row.estimate.bound
    terms = {term: times * seconds for term, seconds in bound.terms.items()}
    return replace(row, estimate=replace(row.estimate, bound=Bound(terms, times * bound.waiting)))


@pytest.mark.slow
def test_the_text_says_what_limits_each_and_why_it_is_first(fitted):
    made, _ = fitted
    texts = [row_text(1, row, color=False) for row in made.rows]
    assert all("limited by: " in text for text in texts)
    assert [("MFU at most " in text) for text in texts] == [row.mfu < 0.995 for row in made.rows]
    assert ("its default configuration" in fit_head(made.rows[0], default=True)) and "default" not in fit_head(
        made.rows[0]
    )
    tail = fit_tail(made, (1, 2, 3))
    assert (
        "1. is before 2.: " in tail
        and "2. is before 3.: " in tail
        and "forecast of 1., 30% to 50% of the bound, as measured: " in tail
        and "best first" not in tail
    )
    tail = fit_tail(made, (2, 1, 3))  # as they were printed, while the search went on
    assert tail.startswith("best first: 2, 1, 3\n2. is before 1.: ") and "\n1. is before 3.: " in tail
    row, slower = made.rows[0], made.rows[-1]
    alike = replace(made, rows=(row, row, longer(row, 1.14)), tied=7)
    assert ties(alike, (3, 1, 2)) == [[3, 1, 2]]
    assert "\n3., 1., 2. are tied, with 7 of the meshes compared: their bounds differ by less than 15%" in fit_tail(
        alike, (3, 1, 2)
    )
    apart = replace(made, rows=(row, longer(row, 1.16), longer(row, 1.3)))
    assert ties(apart, (1, 2, 3)) == [[2, 3]]
    waits = replace(row.estimate.bound, waiting=row.seconds)
    text = row_text(1, replace(row, estimate=replace(row.estimate, bound=waits)), color=False)
    assert f"waiting for collectives {seconds_text(row.seconds)}" in text
    assert why(row, row).endswith("no more memory")
    assert (slower.order.bound > row.order.bound) == ("longer, limited by" in why(row, slower))
    for one, other in itertools.pairwise(made.rows):
        assert one.order <= other.order
    four = replace(row, choice=replace(row.choice, sizes=MeshSizes(tp=2, dp_shard=4)))
    (_, torchrun), (_, slurm) = launch_lines(four, "train.py")
    ran = "torchrun --nnodes 4 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint {}:29500 train.py"
    head = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    assert torchrun == ran.format("$HEAD_NODE")
    asked = "sbatch --nodes 4 --exclusive --ntasks-per-node 1 --gpus-per-node 2"
    assert slurm == f"{asked} --wrap 'srun {ran.format(head)}'"


@pytest.mark.slow
def test_published_runs_make_a_forecast(fitted):
    """Of the same device and kind of model; not above the bound; what was measured goes first."""
    made, _ = fitted
    row = made.rows[0]
    assert made.forecast is None and made.speeds(row) == (0.3, 0.5)
    assert "and no published run of such a model on slow is known" in fit_tail(
        replace(made, efficiency=None), (1, 2, 3)
    )
    dense, sparse = forecast_of("h100", 6e9, 10**9), forecast_of("h100", 2e9, 10**9)
    assert forecast_of("mi300x", 6e9, 10**9) is None and (dense.of, sparse.of) == (
        "dense models",
        "models with experts",
    )
    runs = [one for one in published_runs() if one.device == "h100" and not one.experts]
    assert (dense.least, dense.most) == (min(one.mfu for one in runs), max(one.mfu for one in runs))
    like = replace(made, efficiency=None, forecast=Forecast(0.25 * row.mfu, 0.5 * row.mfu, 3, "dense models"))
    assert like.speeds(row) == pytest.approx((0.25, 0.5))
    speed = row.estimate.tokens_per_second
    found = fit_tail(like, (1, 2, 3))
    assert "forecast of 1., as 3 published runs of dense models on slow reached: " in found
    assert f"{0.25 * speed:,.0f} to {0.5 * speed:,.0f} tokens/s a device" in found
    assert replace(like, forecast=replace(like.forecast, most=1.0)).speeds(row)[1] == 1.0


def test_published_runs_are_listed_with_their_sources():
    """With a known device; MFUs of what tokens tell are those of our count, which the page of published runs makes."""
    for run in published_runs():
        assert run.device in known_devices() and 0 < run.mfu < 1 and run.source
    assert len({(one.run, one.gpus) for one in published_runs()}) == len(published_runs())
    page = (Path(__file__).parents[1] / "docs/published-runs.md").read_text("utf-8")
    for run in published_runs():
        counts = ["" if n is None else f"{n:,}" for n in (run.gpus, run.tokens)]
        line = f"| {run.run} | {run.device} | {counts[0]} | {counts[1]} | {run.mfu:.1%} | {run.source} |"
        assert line in page, line


def rows_of(one, tmp_path):
    """For the name of each script, (row, plan, the model's numbers): of a model in stages, of a whole one, and with each choice that
    changes a line of the script."""
    made, _ = one
    plan = tmp_path / "staged.json"
    plan.write_text(json.dumps(STAGED))
    whole = next(row for row in made.rows if row.choice.schedule is None)
    rows = {"whole": whole}
    alone = replace(whole.choice, micro_batch=1, micro_batches=2, sharded_logits=False, sequence_parallel=False)
    choices = {
        "staged": replace(alone, sizes=MeshSizes(tp=1, pp=2), schedule="1f1b"),
        "over cp": replace(alone, sizes=MeshSizes(tp=1, cp=2), checkpointing="full"),
        "offloaded": replace(alone, sizes=MeshSizes(tp=1, dp_shard=2), offload=True),
        "regathered": replace(alone, sizes=MeshSizes(tp=2), sequence_parallel=True, regather=True),
    }
    rows |= {name: replace(whole, choice=choice) for name, choice in choices.items()}
    # A plan of a user has no rules for cp; `auto` derives them.
    found = {name: (row, "auto" if row.choice.sizes.cp > 1 else str(plan), SETTINGS) for name, row in rows.items()}
    experts = replace(whole.estimate, asked=replace(whole.estimate.asked, model="mixtral"))
    spread = replace(whole, choice=replace(alone, sizes=MeshSizes(tp=1, dp_shard=2, ep=2)), estimate=experts)
    return found | {"experts": (spread, "auto", EXPERTS)}


RUNNER = '''"""Run scripts one after the other in the same processes: PORT:SCRIPT of each. Each has a store of its own."""
import os, runpy, sys

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
for word in sys.argv[1:]:
    os.environ["MASTER_PORT"], _, script = word.partition(":")
    runpy.run_path(script, run_name="__main__")
'''


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_on_two(words):
    """The lines that torchrun's two gloo processes print."""
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        env={**os.environ, "STEPS": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [one.split()[:3] for one in ran.stdout.splitlines() if one.startswith("step")]


STEPS = [["step", "1", "loss"], ["step", "2", "loss"]]


@pytest.mark.slow
def test_sizes_of_axes_and_a_plot(capsys, tmp_path):
    plan, device, file = tmp_path / "staged.json", tmp_path / "slow.json", tmp_path / "fit.svg"
    plan.write_text(json.dumps(STAGED))
    device.write_text(json.dumps({name: getattr(SLOW, name) for name in SLOW.__slots__ if name != "name"}))
    words = ["fit", "llama", str(plan), "--gpus", "4", "--device", str(device), "--global-batch", "8"]
    words += ["--seq-len", str(SEQ), "--pp", "2", "--tp", "1,2", "--best", "9", "--plot", str(file), "--json"]
    assert main([*words, *(f"--set={name}={value}" for name, value in SETTINGS.items())]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["estimate"]["sizes"]["pp"] for row in rows} == {2}
    assert {row["estimate"]["sizes"]["tp"] for row in rows} == {1, 2}
    text = file.read_text()
    assert text.startswith("<?xml") and "pp 2 x tp 2" in text and "bounds, not promises" in text


@pytest.mark.slow
def test_its_script_trains(fitted, tmp_path):
    """As the launch line says, on two gloo processes."""
    row, plan, settings = rows_of(fitted, tmp_path)["whole"]
    script = tmp_path / "train.py"
    script.write_text(script_of(row, plan, is_type=True, settings=settings))
    ((_, line),) = launch_lines(row, str(script))
    assert line == f"torchrun --nproc-per-node 2 {script}"
    assert run_on_two(line.split()[1:]) == STEPS


@pytest.mark.exhaustive
def test_each_choice_has_a_script_that_trains(fitted, tmp_path):
    """Each begins and ends its process groups: the next one begins in the same processes."""
    rows = rows_of(fitted, tmp_path)
    names = ["staged", "over cp", "offloaded", "regathered", "experts"]
    assert rows.keys() == {"whole", *names}
    for name in names:
        row, plan, settings = rows[name]
        (tmp_path / f"{name}.py").write_text(script_of(row, plan, is_type=True, settings=settings))
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    words = [f"{port}:{tmp_path / name}.py" for port, name in zip(free_ports(len(names)), names, strict=True)]
    assert run_on_two(["--nproc-per-node", "2", str(runner), *words]) == STEPS * len(names)


def programs_of(model, settings):
    step = TrainingStep(SEQ)
    named = Model(model, settings)
    return Programs(named, "auto", Question(model, "auto", False, step), {}, lambda text: None, derive=True)


@pytest.mark.slow
def test_sizes_that_were_not_traced_follow_from_those_that_were():
    """cp is on the line through two sizes, and what is sent over it on (cp - 1) / cp times one, where no two ranks have the same heads; experts are
    as many fewer, and rows are sent as the share of other ranks says."""
    made = programs_of("llama", SETTINGS | {"num_key_value_heads": 8})
    two, four, eight = (made.table(MeshSizes(tp=1, cp=n), "full") for n in (2, 4, 8))
    said = of_context(two, four, (2, 4), 8)
    for name, part in eight.costs.items():
        assert sum(said.costs[name].kept.values()) == pytest.approx(sum(part.kept.values()), rel=0.02, abs=64)
        assert said.costs[name].flops == pytest.approx(part.flops, rel=0.02)
        assert {key: size for key, (_, size) in said.costs[name].traffic.items()} == pytest.approx(
            {key: size for key, (_, size) in part.traffic.items()}, rel=0.02
        )
    made = programs_of("mixtral", EXPERTS)
    two, four = (made.table(MeshSizes(tp=1, dp_shard=n, ep=n), "full") for n in (2, 4))
    said = of_experts(two, 2, 4)
    for name, part in four.costs.items():
        assert said.costs[name].stored.elements == part.stored.elements
        assert said.costs[name].stored.experts == part.stored.experts


@pytest.mark.slow
def test_experts_are_distributed_and_sequences_shared_where_that_is_needed():
    """Many experts and a slow network: the least time is with ep. Fewer sequences than devices, and no room for whole ones: cp."""
    spread = shardplan.fit(
        shardplan.Model("mixtral", settings=EXPERTS | ONE_HEAD),
        gpus=4,
        device=replace(SLOW, node_gpus=4, network_bandwidth=1e8),
        global_batch=8,
        seq_len=SEQ,
        best=2,
    )
    assert spread.rows[0].mfu > 0
    (row, *_) = (row for row in spread.rows if row.choice.sizes.ep > 1)
    assert row.estimate.bound.waiting > 0
    again = shardplan.estimate(
        shardplan.Model("mixtral", settings=EXPERTS | ONE_HEAD),
        "auto",
        row.choice.sizes,
        shardplan.TrainingStep(
            SEQ,
            micro_batch=row.choice.micro_batch,
            precision="fp32",
            micro_batches=row.choice.micro_batches,
            schedule=row.choice.schedule or "1f1b",
        ),
        device=row.estimate.device,
        activation_checkpointing=CHECKPOINTING[row.choice.checkpointing],
        data_parallel={"mixed_precision": {"param": "bfloat16", "reduce": "float32"}},
    )
    assert again.memory == row.estimate.memory and again.bound == row.estimate.bound
    long = SETTINGS | ONE_HEAD
    shared = shardplan.fit(shardplan.Model("llama", settings=long), gpus=2, device=SLOW, global_batch=1, seq_len=SEQ)
    (row,) = (row for row in shared.rows if row.choice.sizes.cp == 2)
    assert dict(shared.refused).keys() == {"tp 2", "cpu_offload"}
    again = shardplan.estimate(
        shardplan.Model("llama", settings=long),
        "auto",
        {"cp": 2},
        shardplan.TrainingStep(SEQ, precision="fp32"),
        device=SLOW,
        activation_checkpointing=CHECKPOINTING[row.choice.checkpointing],
        data_parallel={"mixed_precision": {"param": "bfloat16", "reduce": "float32"}},
    )
    assert again.memory == row.estimate.memory and again.bound == row.estimate.bound


def test_the_bar(monkeypatch, capsys):
    """Only on a terminal; it never goes back."""
    bar = Bar()
    bar.advance(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar.progress("tracing")
    bar.advance(1, 4)
    bar.advance(4, 4)
    drawn = [line.split("\x1b[K")[1] for line in capsys.readouterr().err.split("\r") if line]
    half, full = "#" * 12 + "." * 12, "#" * 24
    assert drawn == [f"[{half}]  50% tracing"] * 2 + [f"[{full}] 100% tracing"]


@pytest.mark.slow
def test_json(capsys, tmp_path):
    device = tmp_path / "mini.json"
    fields = ("memory", "flops", "memory_bandwidth", "node_gpus", "node_bandwidth", "network_bandwidth", "efficiency")
    device.write_text(json.dumps({name: getattr(SLOW, name) for name in fields}))
    script = tmp_path / "train.py"
    arguments = ["fit", "llama", "--gpus", "1", "--device", str(device), "--global-batch", "4", "--seq-len", "32"]
    arguments += [
        "--tokens",
        "1e9",
        "--json",
        "--script",
        str(script),
        *(f"--set={k}={v}" for k, v in SETTINGS.items()),
    ]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, report_schema())
    (first,), (days,) = report["rows"], report["days"]
    assert first["estimate"]["fits"] and 0 < first["mfu"] <= 1 and report["reasons"] == []
    assert days == pytest.approx(1e9 / first["estimate"]["tokens_per_second"] / 86_400)
    assert report["launch"]["torchrun"].endswith("train.py")
    assert report["efficiency"] == [0.3, 0.5]
    ast.parse(script.read_text())


def test_wrong_arguments():
    def of(**options):
        given = {"gpus": 2, "device": SLOW, "global_batch": 4, "seq_len": SEQ} | options
        return shardplan.fit(shardplan.Model("llama", SETTINGS), **given)

    with pytest.raises(ValueError, match="gpus must be a positive integer, not 0"):
        of(gpus=0)
    with pytest.raises(ValueError, match="two shares of the bound"):
        of(efficiency=(0.9, 0.1))
    with pytest.raises(ValueError, match="there is no device 'h10'"):
        of(device="h10")
    for mesh, said in (
        ({"tp": 3}, "tp 3 does not divide 2 devices"),
        ({"x": 2}, "no mesh axis 'x'"),
        ({"tp": 2, "tensor_parallel": 1}, "two names of one mesh axis"),
        ({"tp": 0}, "positive integer"),
    ):
        with pytest.raises(ValueError, match=said):
            shardplan.fit("llama", STAGED, mesh, gpus=2, device=SLOW, global_batch=4, seq_len=SEQ)
    with pytest.raises(ValueError, match="3 devices are no whole nodes of 2 slow: take 2 or 4, or describe"):
        of(gpus=3)
    for tokens in (0, -1e9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="tokens must be a positive number"):
            of(tokens=tokens)


def test_a_global_batch_is_asked_for(capsys):
    assert main(["fit", "llama", "--gpus", "8", "--device", "h100", "--seq-len", "32"]) == 2
    assert "--global-batch" in capsys.readouterr().err


WRONG_LINES = [
    ({"--gpus": "12"}, 2, "12 devices are no whole nodes of 8 h100: take 8 or 16"),
    ({"--device": "h10"}, 2, "there is no device 'h10': did you mean"),
    ({"--device": "none.json"}, 2, "none.json does not exist"),
    ({"--seq-len": "0"}, 2, "--seq-len"),
    ({"--tokens": "-5"}, 2, "tokens must be a positive number"),
    ({"--efficiency": "0.9,0.1"}, 2, "the least first"),
    ({"--script": "no/such/folder/train.py"}, 2, "cannot write no/such/folder/train.py: no folder no/such/folder"),
]


@pytest.mark.parametrize(("options", "code", "message"), WRONG_LINES)
def test_wrong_lines(options, code, message, capsys):
    given = {"--gpus": "8", "--device": "h100", "--global-batch": "8", "--seq-len": "32"} | options
    assert main(["fit", "llama", *(f"{name}={value}" for name, value in given.items())]) == code
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and not shown.out


def test_a_folder_without_a_configuration(tmp_path, capsys):
    arguments = ["--gpus", "8", "--device", "h100", "--global-batch", "8", "--seq-len", "32"]
    assert main(["fit", str(tmp_path), *arguments]) == 1
    assert "config.json" in capsys.readouterr().out


@pytest.mark.slow
def test_what_fits_nowhere():
    """Too little memory; a global batch that no mesh divides."""
    small = SETTINGS | ONE_HEAD | {"num_hidden_layers": 2}
    with pytest.raises(
        ValueError, match=r"nothing fits 1 slow .*: the least .*; take more devices, shorter sequences or"
    ):
        shardplan.fit(
            shardplan.Model("llama", settings=small),
            gpus=1,
            device=replace(SLOW, memory=1000),
            global_batch=1,
            seq_len=SEQ,
        )
    with pytest.raises(
        ValueError, match="no mesh of 4 slow divides 3 sequences .*: take a global batch that 4 divides"
    ):
        shardplan.fit(shardplan.Model("llama", settings=small), gpus=4, device=SLOW, global_batch=3, seq_len=33)
