"""Steps that users write, right ones and wrong ones: `verify --step` names what is wrong, and no right one.

Each file of tests/steps has a step. `# on:` is the model and the mesh, `# named:` what is found, and `# needs:` a package without which it is
skipped, in front of the code.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from processes import RanksFailed, on_ranks

from shardplan.api import verify
from shardplan.api.deriving import deriving
from shardplan.cli.main import main
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.pipeline import look_up
from shardplan.compiler.user_inputs import Model
from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import overlays_of
from shardplan.core.schedules import schedule_of
from shardplan.proof import prove_step
from shardplan.proof.prove_step import (
    DIFFERENT_STEP,
    StepQuestion,
    StepTask,
    _help,
    alone_on,
    differences,
    rank_of,
    task_of,
)
from shardplan.proof.user_step import STEPS, dealt

FOLDER = Path(__file__).parent / "steps"
RIGHT, WRONG = (sorted((FOLDER / kind).glob("*.py")) for kind in ("right", "wrong"))
RIGHT.append(FOLDER.parent.parent / "examples" / "step.py")
ALWAYS = [script for script in RIGHT if "# needs:" not in script.read_text("utf-8")]
SAMPLE = {
    FOLDER / "right" / "average.py",
    *Random(0).sample(ALWAYS, 2),
    *Random(0).sample(WRONG, 5),
}  # `make steps` judges all
USUAL = "qwen3 dp_shard=2 tp=2"
HANGS = "no answer in time"


def said(script: Path, what: str) -> str:
    found = re.search(rf"^# {what}: (.*)$", script.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else ""


@cache
def planned(on: str) -> StepTask:
    name, *words = on.split()
    given = dict(word.split("=") for word in words if "=" in word)
    plan, inputs = given.pop("plan", "auto"), given.pop("inputs", None)
    mesh = replace(MeshSizes(**{axis: int(size) for axis, size in given.items()}), tp=int(given.get("tp", 1)))
    source = Model(name, inputs=inputs)
    derive = deriving(source, mesh, derive=True, sequence_parallel=None)
    found, read = look_up(source, plan, split=True, derive=derive).both
    overlays = overlays_of("sequence_parallel" in words, mesh, context=read.has_context)
    schedule, stages = (schedule_of("1f1b"), mesh.pp) if mesh.pp > 1 else (None, 0)
    reduced = ModelLayouts(found, mesh.tp, mesh.ep, pp=stages or 1, blocks=stages, cp=mesh.cp)
    return task_of(StepQuestion("", reduced, source, read, mesh, overlays, schedule=schedule))


def findings(script: Path) -> list[str]:
    """What is found about a step."""
    task = replace(planned(said(script, "on") or USUAL), script=str(script))
    try:
        [(alone, drew)] = on_ranks(1, alone_on, task)
        seconds = 60 if said(script, "named") == HANGS else 300
        ranks = on_ranks(task.sizes.world_size, rank_of, task, drew, seconds=seconds)
    except RanksFailed as error:
        return [str(error)]
    return [f"{one.message} (line {one.line})" for one in differences(task, alone, ranks)]


def marked(script: Path) -> Any:
    return pytest.param(script, id=script.stem, marks=pytest.mark.slow if script in SAMPLE else pytest.mark.exhaustive)


@pytest.mark.parametrize("script", [*map(marked, (*RIGHT, *WRONG))])
def test_wrong_steps_are_named_and_right_ones_are_not(script: Path) -> None:
    if package := said(script, "needs"):
        pytest.importorskip(package, reason=f"{package} is not installed: with what it needs it takes 300 MB")
    found, expected = "\n".join(findings(script)), said(script, "named")
    assert re.search(expected, found) if expected else not found, f"{found or 'nothing'}, not {expected or 'nothing'}"


@pytest.mark.slow
def test_what_the_page_does_not_promise_is_not_told() -> None:
    """An optimizer that is made before the plan is in tests/test_early_optimizers.py."""
    assert not findings(FOLDER / "untold" / "same_on_one_process.py")


def test_wrong_steps_say_what_they_are_named_by() -> None:
    assert all(said(script, "named") for script in WRONG) and not any(said(script, "named") for script in RIGHT)


def test_the_lines_of_the_page_are_those_of_the_judged_average() -> None:
    page = (FOLDER.parent.parent / "docs" / "proving-a-step.md").read_text("utf-8")
    [block] = re.findall(r"```python\n(@torch.no_grad\(\)\ndef exchange.*?)\n```", page, re.DOTALL)
    own, _, calls = block.partition("\n\nexchange(")
    script = (FOLDER / "right" / "average.py").read_text("utf-8")
    assert own in script and script.count("exchange(model, state.average)") == calls.count("exchange(") + 1 == 2


def test_batches_have_what_the_page_says() -> None:
    def feed(seed: int) -> dict[str, Any]:
        ids = torch.randint(10, 100, (2, 16), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    steps = [dealt(feed, step, 2, alike=False, masked=True) for step in range(STEPS)]
    counts = [[[int((batch["labels"] != -100).sum()) for batch in share] for share in step] for step in steps]
    assert all(len({sum(share) for share in step}) == 2 for step in counts), "unequal numbers on ranks"
    assert [0 in own for step in counts for own in step] == [False] * 5 + [True] and counts[-1][-1][-1]
    every = [batch for step in steps for share in step for batch in share]
    assert all((batch["attention_mask"] == 0).any() for batch in every)
    for _, last in steps:
        assert all(int(batch["input_ids"].flatten().bincount().max()) > 8 for batch in last), "most tokens are one"


def test_a_report_has_the_step_that_is_right_or_what_is_wrong_with_it(monkeypatch: Any, capsys: Any) -> None:
    wrong = Diagnostic(DIFFERENT_STEP, Severity.ERROR, "off", notes=("step.py:1",), help="write")
    words = ["verify", "qwen3", "qwen3", "--dp-shard", "2", "--step", str(RIGHT[-1]), "--json"]
    for found, code in (((), 0), ((wrong,), 1)):
        monkeypatch.setattr(
            prove_step, "prove_step", lambda question, progress, found=found: (found, ("state.log (a rank's own)",))
        )
        assert main(words) == code
        report = json.loads(capsys.readouterr().out)
        assert report["step"] == (None if found else str(RIGHT[-1]))
        assert report["step_apart"] == ([] if found else ["state.log (a rank's own)"])
        assert [one["code"] for one in report["diagnostics"]] == ["SP561"] * len(found)


@pytest.mark.parametrize(
    ("text", "mesh", "said"),
    [
        (None, {"tp": 2}, "does not exist"),
        ("def make(model: ...", {"tp": 2}, "is no Python"),
        ("def make(model): ...", {"dp_shard": 2}, r"has no function step\(model, batches, state\)"),
        ("from train import step, make as made", {"dp_shard": 2}, r"has no function make\(model\)"),
        ("from train import step, make", {"tp": 1}, "several ranks"),
        ("from train import step, make", {"tp": 2048}, "starts at most"),
    ],
)
def test_what_is_no_step_is_said_before_anything_runs(
    tmp_path: Path, text: str | None, mesh: dict[str, int], said: str
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=said):
        verify("no model", "auto", mesh, step=script)


def test_torchs_words_for_a_term_of_the_parameters_have_a_help_of_ours() -> None:
    raised = RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all")
    assert (
        "p.grad.add_(p, alpha=2 * weight)" in _help(raised, "otherwise")
        and _help(RuntimeError("no"), "other") == "other"
    )
