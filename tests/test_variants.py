"""Built-in plans are right for published checkpoints and for the switches of their types, or say which switch they are not for."""

from __future__ import annotations

import inspect
import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from sampling import few
from transformers import AutoConfig

from tests.variants.drawn import draw, judged, problems
from tests.variants.drawn import drawn as random_configurations
from tests.variants.outcome import Outcome, outcome
from tests.variants.published import DATA, checkpoints, combinations, gaps
from tests.variants.trials import Trial, planned, published, sample, unlisted

SEED, COUNT = 5, 40  # of the sample
drawn = cache(sample)
QUICK = ("Command R+", "Moonlight", "Nemotron-H 8B")
OVERLAYS = {
    row["name"]: row["verdicts"]["sp2"] != "none"
    for row in json.loads((DATA.parent.parent / "reports" / "model-types.json").read_text("utf-8"))
    if row["verdicts"]
}


def test_published_checkpoints_have_sources() -> None:
    found = checkpoints()
    assert len(found) >= 150
    assert max(Counter(one.name for one in found).values()) == 1
    assert {one.model_type for one in published()} <= set(planned())
    places = ("github.com/", "huggingface.co/docs/transformers")
    assert [one.name for one in found if not one.source.startswith(places) or not one.fields] == []


@pytest.mark.parametrize("model_type", sorted({one.model_type for one in published()}))
def test_the_numbers_are_fields_of_the_configuration(model_type: str) -> None:
    """Of its class, or read by the model's code."""
    known = AutoConfig.for_model(model_type)
    folder = Path(inspect.getfile(type(known))).parent
    code = " ".join(file.read_text("utf-8") for file in folder.glob("*.py"))
    fields = {field for one in published() if one.model_type == model_type for field in one.fields}
    assert {field for field in fields if not hasattr(known, field) and f'"{field}"' not in code} == set()


def test_combinations_have_names() -> None:
    assert max(Counter(one.name for one in combinations()).values()) == 1


def test_listed_gaps_are_configurations() -> None:
    assert all(key.split(" ")[0] in planned() and why for key, why in gaps().items())


REST = [name for name in (one.name for one in combinations()) if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in few(REST, 6))])
def test_a_combination_is_proven(name: str) -> None:
    one = next(one for one in combinations() if one.name == name)
    found = outcome(one.model_type, one.name, one.fields, one.fields)
    assert found.verdict == "proven", found
    assert len(found.variants) == 1 + OVERLAYS[one.model_type]


@pytest.mark.slow
@pytest.mark.parametrize("index", few(range(COUNT), 8))
def test_a_configuration_is_right_or_refused(index: int) -> None:
    """A sample of `make variants`: proven, or refused with a finding that names a field that it changes, or in the list of gaps."""
    trial = drawn(COUNT, SEED)[index]
    found = outcome(trial.model_type, trial.name, trial.settings, trial.switches)
    assert unlisted([found]) == []
    if found.verdict == "proven":
        assert len(found.variants) == 1 + OVERLAYS[trial.model_type]


def test_a_new_gap_is_told_from_a_listed_one_and_from_a_closed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.variants.trials.gaps", lambda: {"llama old": "why"})
    old = Outcome("llama", "old", "gap")
    assert unlisted([old]) == []
    assert unlisted([replace(old, name="new", about="SP201")]) == ["llama new: SP201"]
    assert unlisted([replace(old, verdict="proven")]) == ["llama old: listed as a gap, and it is none"]
    assert unlisted([replace(old, name="new", verdict="wrong")]) == ["llama new: accepted without a proof"]


@pytest.mark.slow
@pytest.mark.parametrize("index", few(range(12), 3))
def test_a_drawn_configuration_is_right_or_refused(index: int) -> None:
    """A sample of `tests.variants.drawn`: judged with other weights and inputs than the proof's."""
    trial = list(random_configurations(SEED, 12))[index]
    assert problems([judged(trial, 2)]) == []


def test_a_seed_gives_the_same_configurations() -> None:
    for name in ("bamba", "llama"):
        assert draw(name, random.Random(1)) == draw(name, random.Random(1)) != draw(name, random.Random(2))


@pytest.mark.slow
def test_the_plan_that_is_applied_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the program of the proof: what the two have of the layers may differ, and did."""
    trial = Trial(
        "inkling2_text", "sliding", {"layer_types": ["hybrid_sliding", "sliding_attention"], "num_hidden_layers": 2}, ()
    )
    assert judged(trial, 2).verdict == "proven"
    monkeypatch.setattr("shardplan.compiler.layout.model.incoming_of", lambda alike, incoming: {})
    assert judged(trial, 2).verdict == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("google/gemma-3-27b-it (text)", 8),  # its scores are scaled by a number that is no head dim
        *(
            pytest.param(name, 16, marks=pytest.mark.exhaustive)
            for name in (
                "google/gemma-3-27b-it (text)",
                "meta-llama/Meta-Llama-3.1-405B",
                "ai21labs/AI21-Jamba-1.5-Mini",
                "nvidia/Nemotron-H-8B-Base-8K",
                "openai/gpt-oss-20b",
                "LiquidAI/LFM2.5-VL-1.6B (text)",
            )
        ),
    ],
)
def test_a_checkpoint_is_proven_at_more_ranks(name: str, tp: int) -> None:
    one = next(one for one in checkpoints() if one.name == name)
    found = outcome(one.model_type, one.name, one.fields, one.fields, tp=tp)
    assert found.verdict == "proven" and len(found.variants) == 2, found
