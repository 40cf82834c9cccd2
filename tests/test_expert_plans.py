"""The built-in plans with experts distributed: `make ep` checks all of them, `python -m tests.zoo --experts` proves them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import transformers

from shardplan.core.mesh import MeshSizes
from tests.zoo.experts import checked
from tests.zoo.table import read

ROOT = Path(__file__).parent.parent
TABLE = read(ROOT / "docs" / "image-text-types.md") | read(ROOT / "docs" / "model-types.md")
FOUND = {name: entry.experts for name, entry in TABLE.items() if entry.experts}
# Its router draws at random in training, which no plan on several ranks allows.
REFUSED = {"phimoe": "SP370"}
TYPES = sorted({*FOUND, "qwen3_vl_moe"} - {*REFUSED})
SAMPLE = random.Random(7).sample(TYPES, 3)
SMALL, LARGE = MeshSizes(tp=1, dp_shard=2, ep=2), MeshSizes(tp=2, dp_shard=2, ep=4)


def test_all_that_distribute_experts_are_right() -> None:
    wrong = {name: text.split(":")[0] for name, text in FOUND.items() if text != "right"}
    assert wrong == REFUSED
    assert len(FOUND) >= 50


def test_the_types_that_transformers_dispatches_are_among_them() -> None:
    """Those of its own plans, as far as a built-in plan is for the type."""
    models = Path(transformers.__file__).parent / "models"
    texts = [file.read_text("utf-8") for file in models.glob("*/configuration_*.py")]
    classes = [one for text in texts for one in re.split(r"^class ", text, flags=re.MULTILINE)]
    dispatched = [one for one in classes if '"ep_dispatch_experts"' in one]
    assert len(dispatched) >= 60
    types = {found[1] for one in dispatched if (found := re.search(r'model_type = "([^"]+)"', one))}
    assert {name for name in types if name in TABLE and TABLE[name].plan} <= {*FOUND}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            name,
            sizes,
            marks=[] if name in SAMPLE and sizes == LARGE else pytest.mark.exhaustive,
            id=f"{name}-{sizes.ep}",
        )
        for name in TYPES
        for sizes in (SMALL, LARGE)
    ],
)
def test_a_plan_with_experts_distributed(name: str, sizes: MeshSizes) -> None:
    """Every variant of the plan has right layouts, and the experts are distributed in half of them."""
    report = checked(name, "auto", sizes, proof=False)
    assert report.ok, report
    without = ["tensor_parallel", "sequence_parallel"] if TABLE[name].has("sp") else ["tensor_parallel"]
    assert (
        list(report.variants) == [*without, "expert_parallel", "expert_parallel.sequence_parallel"][: 2 * len(without)]
    )
