"""Numbers above what any mesh or step has are refused before anything is computed with them, whichever way they come."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from shardplan import api
from shardplan.cli.main import main
from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.core.estimates import TrainingStep
from shardplan.core.mesh import AXES, MeshSizes
from shardplan.core.size_bounds import MOST_MICRO_BATCHES, MOST_RANKS, MOST_TOKENS
from shardplan.cost.mesh_candidates import meshes_of
from shardplan.language import parse_plan
from tests.examples import tree

NO_SIZES = [
    0,
    -1,
    True,
    2.0,
    1e30,
    float("nan"),
    float("inf"),
    "8",
    None,
    [2],
    MOST_RANKS + 1,
    10**30,
    10**5000,
    -(10**5000),
]
TWO = ["llama", "llama"]
COMMANDS = {
    "validate": TWO,
    "verify": TWO,
    "show": TWO,
    "estimate": [*TWO, "--seq-len", "32"],
    "diff": [*TWO, "llama"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("size", ["30000000", "1" + "0" * 30, "9" * 5000, "1e3", "nan", "-1", "2.0", "0", "00"])
def test_no_command_takes_such_a_size(command: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([f"--tp={size}"], [f"--mesh=dp_shard={size}"]):
        assert main([command, *COMMANDS[command], *words]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "is not a positive integer" in error or "is more than 1,048,576" in error
        assert len(error) < 200


@pytest.mark.parametrize("command", COMMANDS)
def test_nor_sizes_that_multiply_to_too_many(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *COMMANDS[command], "--mesh", "dp_shard=1048576,tp=2"]) == 2
    assert "are 2,097,152 ranks: a mesh has at most 1,048,576" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["init", "llama", "--tp"],
        ["convert", "hf", "--model", "llama", "--tp"],
        ["validate", *TWO, "--seq-len"],
        ["verify", *TWO, "--tp", "2", "--pp", "2", "--processes", "--micro-batches"],
        ["estimate", *TWO, "--tp", "2", "--seq-len"],
        ["estimate", *TWO, "--seq-len", "8", "--tp", "2", "--micro-batch"],
        ["estimate", *TWO, "--seq-len", "8", "--tp", "2", "--micro-batches"],
        ["fit", "llama", "--device", "h100", "--global-batch", "8", "--seq-len", "8", "--gpus"],
        ["fit", "llama", "--device", "h100", "--gpus", "8", "--seq-len", "8", "--global-batch"],
        ["fit", "llama", "--device", "h100", "--gpus", "8", "--global-batch", "8", "--seq-len"],
        ["diff", *TWO, "llama", "--seq-len"],
        ["show", *TWO, "--html", "page.html", "--seq-len", "8", "--micro-batches"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_nor_other_counts(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "1" + "0" * 12]) == 2
    assert "the most that is accepted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "size",
    NO_SIZES,
    ids=lambda size: f"{float(size):g}" if isinstance(size, int) and abs(size) < 10**40 else type(size).__name__,
)
def test_nor_does_python(size: Any) -> None:
    for axis in AXES:
        if axis == "tp" and size is None:
            continue  # no size is given
        with pytest.raises(ValueError, match=f"the size of mesh axis {axis} must be"):
            MeshSizes(**{axis: size})
        with pytest.raises(ValueError, match=f"the size of mesh axis {axis} must be"):
            api.validate("llama", "llama", {axis: size})
    for name in ("seq_len", "micro_batch", "micro_batches"):
        larger = size * 100 if isinstance(size, int) and size > 1 else size  # some bounds are above those of meshes
        with pytest.raises(ValueError, match=f"{name} must be"):
            TrainingStep(**{"seq_len": 8, name: larger})
    if size is not None:
        with pytest.raises(ValueError, match="tp must be"):
            api.init_plan("llama", tp=size)
    with pytest.raises(ValueError, match="number of devices must be"):
        meshes_of(size)
    with pytest.raises(ValueError, match="gpus must be"):
        api.fit("llama", gpus=size, device="h100", global_batch=8, seq_len=8)


def test_a_mesh_has_a_bound_and_messages_stay_short() -> None:
    with pytest.raises(ValueError, match="2,097,152 ranks"):
        api.validate("llama", "llama", {"tp": 2, "dp_shard": MOST_RANKS})
    with pytest.raises(ValueError, match="2,097,152 ranks"):
        api.validate("llama", "llama", {"tp": 2, "dp_shard": MOST_RANKS})
    with pytest.raises(ValueError) as raised:
        MeshSizes(tp=10**4000)
    assert len(str(raised.value)) < 120
    MeshSizes(tp=MOST_RANKS)
    TrainingStep(MOST_TOKENS, micro_batches=MOST_MICRO_BATCHES)


def test_no_machine_is_filled_with_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *TWO, "--mesh", "tp=2,dp_shard=1024", "--processes"]) == 2
    assert "(--processes) starts at most 1024, not 2048" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at most 1024"):
        api.verify("llama", "llama", {"tp": 2, "dp_shard": 1024}, processes=True)


def test_the_largest_size_is_answered_in_little_memory() -> None:
    plan, model = parse_plan("llama").plan, tree("llama-3.1-8b")
    assert plan is not None
    resolved, _ = bind(plan, model, MeshSizes(tp=MOST_RANKS))
    small, _ = bind(plan, model, MeshSizes(tp=2))
    check(small)  # what is imported and remembered
    tracemalloc.start()
    found = check(resolved)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20
    (vocabulary,) = [d for d in found if d.code == "SP321"]
    assert "leaves rank 128256 of tp=1048576 without a row" in vocabulary.message


@pytest.mark.parametrize(
    ("rows", "tp", "said"), [(10, 4, "the ranks get 3, 3, 3 and 1 rows"), (100, 9, "8 ranks get 12 rows, the last 4")]
)
def test_what_the_ranks_get_is_said(rows: int, tp: int, said: str) -> None:
    from shardplan.compiler.check.vocabulary_rows import chunk_rows
    from shardplan.compiler.check.vocabulary_size import _fill

    assert _fill(rows, tp, chunk_rows(rows, tp)) == said


@pytest.mark.torch
def test_a_plan_that_splits_nothing_is_not_run_on_a_million_ranks(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text('version: "1"\ntensor_parallel:\n  model.layers.*.self_attn: replicate\n')
    assert main(["validate", "llama", str(plan), "--tp", str(MOST_RANKS), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    assert [one["code"] for one in found] == ["SP309", "SP520"]
