"""The built-in plans with experts distributed: `make ep` checks all of them, `python -m tests.zoo --experts` proves them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardplan import Model, validate
from tests.zoo import expert_types
from tests.zoo.experts import checked
from tests.zoo.table import read

ROOT = Path(__file__).parent.parent
TABLE = read(ROOT / "reports" / "image-text-types.md") | read(ROOT / "reports" / "model-types.md")
FOUND = {name: entry.experts for name, entry in TABLE.items() if entry.experts}
PAGE = ROOT / "reports" / "expert-types.md"
CLASSES = read(PAGE)
# Its router draws at random in training, which no plan on several ranks allows.
REFUSED = {"phimoe": "SP370"}
UNPROVEN = {"PhimoeConfig": "SP370"}
TYPES = sorted({*FOUND, "qwen3_vl_moe"} - {*REFUSED})
SAMPLE = [
    *random.Random(7).sample(TYPES, 3),
    "gemma4",
]  # with the sequence split, ranks run whole experts on their own tokens
SMALL, LARGE = {"tp": 1, "dp_shard": 2, "ep": 2}, {"tp": 2, "dp_shard": 2, "ep": 4}


def test_all_that_distribute_experts_are_right() -> None:
    wrong = {name: text.split(":")[0] for name, text in FOUND.items() if text != "right"}
    assert wrong == REFUSED
    assert len(FOUND) >= 50


def test_all_that_transformers_dispatches_is_proven_or_named_with_a_reason() -> None:
    """Its configuration classes with experts that its own plans dispatch."""
    assert len(CLASSES) >= 65 and set(CLASSES) == set(expert_types.dispatched())
    assert {name: e.experts.split(":")[0] for name, e in CLASSES.items() if e.experts != "right"} == UNPROVEN


def test_the_page_of_configurations_is_made_from_its_table() -> None:
    assert PAGE.read_text("utf-8") == expert_types.page(list(CLASSES.values()))


@pytest.mark.parametrize("name", ["Step3p7TextConfig", "Glm4vMoeTextConfig"])
def test_a_class_without_a_causal_one(name: str) -> None:
    """All variants, with every gradient."""
    case = expert_types.CASES[name]
    report = validate(Model(expert_types.model_of(name), inputs=case.inputs), "auto", expert_types.SIZES)
    assert report.ok and report.proven, report
    assert "expert_parallel" in report.variants


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            name,
            sizes,
            marks=[] if name in SAMPLE and sizes == LARGE else pytest.mark.exhaustive,
            id=f"{name}-{sizes['ep']}",
        )
        for name in TYPES
        for sizes in (SMALL, LARGE)
    ],
)
def test_a_plan_with_experts_distributed(name: str, sizes: dict[str, int]) -> None:
    """Every variant of the plan has right layouts, and the experts are distributed in half of them."""
    report = checked(name, "auto", sizes, proof=False)
    assert report.ok, report
    without = ["tensor_parallel", "sequence_parallel"] if TABLE[name].has("sp") else ["tensor_parallel"]
    assert (
        list(report.variants) == [*without, "expert_parallel", "expert_parallel.sequence_parallel"][: 2 * len(without)]
    )


def test_what_all_experts_share_takes_no_rule_of_its_own() -> None:
    """Muse Spark's norm of each expert's result is whole on every rank, and its gradient is a sum."""
    rule = {"expert_parallel": {"model.layers.*.mlp.experts.post_expert_norm": "token_wise"}}
    plan = {"version": "1", "name": "mine", "extends": "muse_spark_text", **rule}
    model = expert_types.model_of("MuseSparkTextConfig")
    report = validate(model, plan, expert_types.SIZES, layouts=False)
    assert {d.code for d in report.diagnostics} == {"SP395"}, report
    assert "is part of a module whose experts are distributed" in str(report)


def test_experts_that_return_their_input_have_no_stack_of_their_own() -> None:
    """LongCat's ids beyond its stacks name experts without parameters: a finding, with the section and without."""
    section = {"expert_parallel": {"model.layers.*.mlp.experts": "ep_dispatch"}}
    plan = {"version": "1", "name": "mine", "extends": "longcat_flash", **section}
    for asked, code in (("auto", "SP393"), (plan, "SP394")):
        report = validate("longcat_flash", asked, expert_types.SIZES, layouts=False)
        assert [d.code for d in report.diagnostics if d.is_error] == [code], report
