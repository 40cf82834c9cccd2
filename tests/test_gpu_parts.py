"""The script for a CUDA device: what becomes of parts that hang, fail or are killed; and that its parts run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import running
from tests.gpu.rows import MARK
from tests.gpu.running import ROOT, Results, run_parts
from tests.gpu.table import PARTS, Part

FOLDER = ROOT / "tests" / "gpu"
NO_PARTS = {
    "__init__",
    "__main__",
    "cases",
    "host_group",
    "rank_calls",
    "rows",
    "running",
    "summary",
    "table",
    "timing",
}
ROW = f"print('\\n{MARK}' + '%s', flush=True)"
# A child in a session of its own that no request ends, and that holds the output open.
CHILD = """
import os, signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
pid = subprocess.Popen([sys.executable, "-c", child], start_new_session=True).pid
open(sys.argv[1], "w").write(f"{pid} {os.getpid()}")
"""


def part(name, code, *words, seconds=60.0, needs_cuda=False):
    return Part(name, "a test", seconds, (sys.executable, "-c", code, *map(str, words)), needs_cuda)


def row(**fields):
    return ROW % json.dumps(fields)


def run(folder, *parts, device="cuda", seconds=120.0):
    results = Results(folder)
    fine = run_parts(parts, results, device, seconds, {})
    results.close()
    return fine, records_of(folder)


def records_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def statuses(records):
    return {record["part"]: record["status"] for record in records if "status" in record}


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_part_that_hangs_is_killed_with_its_children_and_the_rest_runs(tmp_path):
    hangs = CHILD + row(case="first", ok=True) + "\ntime.sleep(600)"
    fine, records = run(
        tmp_path / "out",
        part("hangs", hangs, tmp_path / "pids", seconds=2.0),
        part("next", row(case="second", ok=True)),
    )
    assert not fine and statuses(records) == {"hangs": "timed out", "next": "passed"}
    assert [record["row"]["case"] for record in records if "row" in record] == ["first", "second"]
    assert not any(runs(pid) for pid in (tmp_path / "pids").read_text().split())


def test_children_that_outlive_their_part_are_killed_too(tmp_path):
    fine, records = run(tmp_path / "out", part("ends", CHILD, tmp_path / "pids"))
    assert fine and records[-1]["seconds"] < 30
    assert not any(runs(pid) for pid in (tmp_path / "pids").read_text().split())


def test_what_fails_is_recorded_and_the_rest_runs(tmp_path):
    fine, records = run(
        tmp_path,
        part("raises", row(case="before", ok=True) + "\nraise ValueError('not | here')"),
        part("dies", "import os; os.abort()"),
        part("wrong", row(case="a", ok=False) + "\n" + row(case="b", ok=True)),
        part("no row", f"print('{MARK}' + '{{')"),
        part("last", row(case="c", value=1.5)),
    )
    assert not fine
    assert statuses(records) == {
        "raises": "failed",
        "dies": "failed",
        "wrong": "failed",
        "no row": "failed",
        "last": "passed",
    }
    ended = {record["part"]: record for record in records if "status" in record}
    assert ended["raises"]["why"] == "exit code 1" and ended["raises"]["output"][-1] == "ValueError: not | here"
    assert ended["dies"]["why"] == f"exit code {-signal.SIGABRT}" and ended["wrong"]["why"] == "1 wrong rows"
    assert ended["last"]["command"][:2] == [sys.executable, "-c"]
    summary = (tmp_path / "summary.md").read_text()
    assert (
        "| raises | a test | failed: exit code 1 | 1 | 0 |" in summary
        and "| a | NO |" in summary
        and "| c | 1.5 |" in summary
    )
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "summary.md", "log.txt"}
    assert "ValueError: not | here" in (tmp_path / "log.txt").read_text()


def test_parts_are_skipped_or_not_run_with_the_reason(tmp_path, monkeypatch):
    needs = part("needs", "raise SystemExit(1)", needs_cuda=True)
    fine, records = run(tmp_path / "cpu", needs, part("runs", ""), device="cpu")
    assert fine and statuses(records) == {"needs": "skipped", "runs": "passed"}
    assert records[0]["why"] == "no CUDA device"
    monkeypatch.setattr(running, "LEAST", 0.5)
    sleeps = part("sleeps", "import time; time.sleep(600)")
    fine, records = run(tmp_path / "late", sleeps, part("late", ""), seconds=1.5)
    assert not fine and statuses(records) == {"sleeps": "timed out", "late": "not run"}
    assert records[-1]["why"] == "0 s were left"


def test_results_are_whole_after_the_script_was_killed(tmp_path):
    endless = CHILD + f"\nfor _ in range(60):\n    {row(case='x' * 2000, ok=True)}\ntime.sleep(600)"
    code = f"""
from pathlib import Path
from tests.gpu.running import Results, run_parts
from tests.gpu.table import Part
import sys
first = Part("first", "", 60.0, (sys.executable, "-c", {row(case="kept")!r}))
endless = Part("endless", "", 60.0, (sys.executable, "-c", {endless!r}, {str(tmp_path / "pids")!r}))
run_parts([first, endless], Results(Path({str(tmp_path / "out")!r})), "cuda", 60.0, {{}})
"""
    records = tmp_path / "out" / "results.jsonl"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as script:
        wait_for(lambda: records.exists() and records.stat().st_size > 100_000)
        script.kill()
    found = records_of(tmp_path / "out")
    assert records.read_bytes().endswith(b"\n") and len(found) > 30
    assert found[0]["row"] == {"case": "kept"} and statuses(found) == {"first": "passed"}
    assert "| first |" in (tmp_path / "out" / "summary.md").read_text()
    child, own = map(int, (tmp_path / "pids").read_text().split())
    wait_for(lambda: not runs(own))  # the kernel ends it
    os.kill(child, signal.SIGKILL)  # the test's


def test_results_are_not_overwritten(tmp_path):
    run(tmp_path, part("one", ""))
    with pytest.raises(FileExistsError):
        Results(tmp_path)
    command = [sys.executable, "-m", "tests.gpu", "versions", "--out", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 2 and "has results: name another folder" in said.stderr


def test_every_file_is_a_part_or_serves_parts():
    own = {
        words[2].removeprefix("tests.gpu.") for entry in PARTS if (words := entry.command)[2].startswith("tests.gpu.")
    }
    assert own | NO_PARTS == {path.stem for path in FOLDER.glob("*.py")} and not own & NO_PARTS
    assert all(entry.command[-1] == "DEVICE" for entry in PARTS if entry.command[2].startswith("tests.gpu."))
    # All others run on a CPU.
    assert {entry.name for entry in PARTS if entry.needs_cuda} == {"device_tests", "benchmark"}
    assert len({entry.name for entry in PARTS}) == len(PARTS)


@pytest.mark.slow
@pytest.mark.torch
def test_parts_run_on_a_cpu(tmp_path):
    command = [
        sys.executable,
        "-m",
        "tests.gpu",
        "versions",
        "device_tests",
        "attention",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    records = records_of(tmp_path)
    described = records[0]["run"]
    assert (
        "versions device_tests attention --device cpu" in described["command"] and described["torch"] != "not installed"
    )
    assert statuses(records) == {"versions": "passed", "device_tests": "skipped", "attention": "passed"}
    cases = {record["row"]["case"]: record["row"] for record in records if "row" in record}
    assert cases["torch's ThreadedGroup"]["ok"] and cases["grouped, boolean, bfloat16"]["operators"]
    assert cases["grouped, causal, bfloat16, CUDNN_ATTENTION"]["accepted"] is False


@pytest.mark.slow
@pytest.mark.torch
def test_a_step_on_threads_is_judged():
    import torch

    from tests.gpu.cases import Case, Run, errors, judged, references
    from tests.gpu.one_process import on_threads

    for case in (
        Case("llama", sequence_parallel=True, checkpointing=True, padded=True),
        Case("qwen3_moe, all experts", ep=2, sequence_parallel=True, dtype=torch.bfloat16),
    ):
        found = on_threads(case, "cpu")
        assert found["ok"] and found["ranks"] == 2, (case, found)
        exact, plain = references(case, case.dtype, "cpu")
        right = plain or exact
        assert judged(case, right, exact, plain)["ok"]
        name = max(right.gradients, key=lambda n: errors(right, exact)[n])
        wrong = Run(right.loss, right.logits, {**right.gradients, name: right.gradients[name] * 1.2})
        assert judged(case, wrong, exact, plain)["worst"] == name and not judged(case, wrong, exact, plain)["ok"]
        missing = Run(right.loss, right.logits, {n: g for n, g in right.gradients.items() if n != name})
        assert not judged(case, missing, exact, plain)["ok"]
