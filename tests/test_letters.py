"""The letters that typing infers at the boundaries of modules, compared with those that a run with real moves shows: a value and its
gradient, each whole, split or a partial sum over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardplan.compiler.layout.crossings import Crossings
from shardplan.compiler.layout.spread import Spread
from shardplan.compiler.lower import Program
from shardplan.core.tree import ancestors
from shardplan.language import parse_plan
from shardplan.model.reduced.trace import Event
from shardplan.proof import first_difference as watched
from shardplan.proof.first_difference import Place
from shardplan.proof.simulate import Run
from shardplan.proof.threads import rank_threads
from tests.planned_run import planned_run, run_of
from tests.soundness.edits import edits, written_out
from tests.soundness.judge import parse
from tests.soundness.tasks import PLANS, subject_of
from tests.zoo.entry import Entry
from tests.zoo.table import read

TABLE = Path(__file__).parents[1] / "reports" / "model-types.md"
# (value, gradient) -> the letter
LETTERS = {("whole", "whole"): "I", ("whole", "sum"): "R", ("split", "split"): "V", ("sum", "whole"): "P"}


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> dict[Place, str]:
    """Place -> the kind of type that the last typed run inferred there, outside of the module; "" where the value is zero, and where it
    is none that typing can tell, as how often the code around it runs depends on the data."""
    found: dict[Place, str] = {}
    enter, leave = Crossings.enter, Crossings.leave

    def note(crossings: Crossings, event: Event, side: Any, numbers: tuple[int, ...]) -> None:
        for name, number in zip(event.names, numbers, strict=True):
            kind = crossings.typed.type_of(number)
            untold = kind.kind == "?" and not crossings.spreads.uneven.isdisjoint(ancestors(event.module))
            found[Place(event.module, event.place[1], side, name)] = "" if kind.spread.empty or untold else kind.kind

    def entered(self: Crossings, event: Event) -> None:
        enter(self, event)
        note(self, event, "argument", event.inputs)

    def left(self: Crossings, event: Event) -> None:
        leave(self, event)
        note(self, event, "result", event.outputs)

    monkeypatch.setattr(Crossings, "enter", entered)
    monkeypatch.setattr(Crossings, "leave", left)
    return found


def shown(spreads: dict[Place, Spread | None]) -> Iterator[tuple[Place, str]]:
    """Place -> the letter of a value with a gradient; "" where it is none of the four, or zero."""
    for place, value in spreads.items():
        gradient = spreads.get(place._replace(gradient=True))
        if not place.gradient and value is not None and gradient is not None and not (value.empty or gradient.empty):
            yield place, LETTERS.get((value.kind, gradient.kind), "")


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3_text", "mixtral", "deepseek_v3"])
def test_letters_are_those_of_the_run(
    name: str, sequence_parallel: bool, inferred: dict[Place, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = compared(name, name, sequence_parallel, inferred, monkeypatch)
    assert len(both) > 50
    assert apart(both) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", [e for e in read(TABLE).values() if e.verdicts], ids=lambda e: e.name)
def test_letters_of_every_type_are_those_of_the_run(
    entry: Entry, inferred: dict[Place, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variant in ("tp", "sp"):
        if entry.has(variant):
            assert apart(compared(entry.name, entry.plan, variant == "sp", inferred, monkeypatch)) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("word", [word for word in PLANS if not word.endswith(":ep")])
def test_letters_of_right_edits_are_those_of_the_run(
    word: str, sequence_parallel: bool, inferred: dict[Place, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the edits of soundness those that the layout check lets pass."""
    plan, model = subject_of(word, 2)
    document, right = written_out(parse_plan(plan).plan, model.tree), 0
    for edit in edits(document, sequence_parallel=sequence_parallel):
        inferred.clear()
        edited = parse(edit.document)
        ran = None if edited is None else run_of(model, edited, sequence_parallel=sequence_parallel)
        if ran is not None:
            right += 1
            assert apart(letters(*ran, inferred, monkeypatch)) == {}, edit.what
    print(f"{right} edits of {word} are right")


def compared(
    name: str, plan: str, sequence_parallel: bool, inferred: dict[Place, str], monkeypatch: pytest.MonkeyPatch
) -> dict[Place, tuple[str, str]]:
    """Place -> the inferred letter and that of the run; at the places that have both."""
    inferred.clear()
    _, program, run = planned_run(name, plan, sequence_parallel=sequence_parallel)
    return letters(program, run, inferred, monkeypatch)


def letters(
    program: Program, run: Run, inferred: dict[Place, str], monkeypatch: pytest.MonkeyPatch
) -> dict[Place, tuple[str, str]]:
    """As `compared`, of a program whose layouts were found last."""
    typed = dict(inferred)
    spreads: dict[Place, Spread | None] = {}
    monkeypatch.setattr(
        watched, "_first", lambda whole, ranks, program: spreads.update(watched.spreads_of(whole, ranks, program))
    )
    with rank_threads(2) as on_ranks:
        watched.first_difference(run, program, on_ranks)
    assert [place for place, spread in spreads.items() if spread is None] == [], "a right plan has no first difference"
    return {place: (typed[place], letter) for place, letter in shown(spreads) if place in typed}


def apart(both: dict[Place, tuple[str, str]]) -> dict[Place, tuple[str, str]]:
    """The places whose letters differ; a value or gradient that is none of the four, or zero, tells nothing."""
    return {place: letters for place, letters in both.items() if letters[0] != letters[1] and "" not in letters}
