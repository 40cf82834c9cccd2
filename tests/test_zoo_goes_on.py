"""What lets `make zoo` end: rows are bounded, and what was judged with the same code, releases and plan is left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest

from tests.zoo import judged_with, workers
from tests.zoo.differences import differences
from tests.zoo.workers import each


def made(row: str) -> str:
    """A judgement: one that raises, one that kills its process, one that does not end, one that waits for ever."""
    if row == "raises":
        raise ValueError("of the model's own code")
    if row == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if row == "waits":
        threading.Event().wait()
    while row == "long":
        pass
    return row.upper()


def test_a_row_that_does_not_end_or_ends_its_process_is_told_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(workers, "WAITING", 3)
    rows = ["a", "waits", "raises", "long", "b", "dies", "c"]
    found = {row: said for row, said, _ in each(made, rows, jobs=2, seconds=1)}
    assert found == {
        "a": "A",
        "b": "B",
        "c": "C",
        "raises": "ValueError: of the model's own code",
        "long": "takes more than 1 s",
        "waits": "takes more than 1 s",
        "dies": f"ends the process ({-signal.SIGSEGV})",
    }


@dataclass
class Row:
    plan: str | None
    judged: dict[str, str] = field(default_factory=dict)


def test_a_row_is_judged_again_after_a_change_of_its_plan_of_our_code_or_of_a_release(monkeypatch):
    arcee, gpt2 = (Row(plan, {"verdicts": judged_with.key(plan)}) for plan in ("arcee", "gpt2"))
    derived = Row("derived", {"verdicts": judged_with.key(None)})
    assert all(judged_with.is_current(row, "verdicts") for row in (arcee, gpt2, derived))
    assert not judged_with.is_current(arcee, "experts") and not judged_with.is_current(Row("arcee"), "verdicts")
    text = judged_with._text

    def changed(plan: str) -> str:  # arcee extends it
        return text.__wrapped__(plan) + "# more" if plan == "llama" else text.__wrapped__(plan)

    with monkeypatch.context() as patch:
        patch.setattr(judged_with, "_text", changed)
        assert [judged_with.is_current(row, "verdicts") for row in (arcee, gpt2, derived)] == [False, True, True]
    for name, other in (("code", lambda _: "other"), ("version", lambda name: f"{name} 9")):
        with monkeypatch.context() as patch:
            patch.setattr(judged_with, name, other)
            assert not any(judged_with.is_current(row, "verdicts") for row in (arcee, gpt2, derived))


def test_the_page_says_with_which_releases_how_many_were_judged():
    rows = [Row("llama", {"verdicts": "torch 2.13.0, transformers 5.23.0, diffusers 0.42.1, 0123"})] * 2 + [
        Row("llama")
    ]
    assert judged_with.releases(rows, {"verdicts": "TP"}) == (
        "- TP: 2 with torch 2.13.0, transformers 5.23.0, diffusers 0.42.1; 1 with releases that were not noted."
    )


@pytest.mark.slow
def test_the_rooms_that_do_not_count_are_imported_by_no_judgement():
    code = (
        "import sys; from tests.zoo import checkpoints, context, experts, pipelines; from tests.zoo.entry import Entry, made_again; "
        "from tests.zoo.judged_with import NOT_RUN; e = context.with_context(made_again(Entry('phi')), {'cp': 2, 'tp': 2}); "
        "e = checkpoints.with_checkpoints(pipelines.with_pipeline(experts.with_experts(e))); assert e.context and e.checkpoints; "
        "print([name for name in sys.modules if name.startswith('shardplan.') and name.split('.')[1] in NOT_RUN])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=judged_with.ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_what_two_judgements_say_otherwise_is_listed():
    """A verdict that one of them lacks is not compared, and neither is a row that one of them lacks."""
    right = {"verdicts": {"tp2": "right", "sp2": "right"}, "inputs": ["text"]}
    before = [{"name": name, **right} for name in "abc"]
    after = [
        {"name": "a", "verdicts": {"tp2": "right", "tp4": "wrong"}, "inputs": ["text"]},
        {"name": "b", "verdicts": {"tp2": "refused", "sp2": "right"}, "inputs": ["image"]},
        {"name": "d", **right},
    ]
    expected = ("b", "tp2 right, inputs ['text']", "tp2 refused, inputs ['image']")
    assert differences(before, after) == (2, [expected])
