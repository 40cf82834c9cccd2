"""The rules for cp that are derived for model types drawn by a seed, in real processes, as many as the mesh has."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sampling import SEED, sampled

import shardplan
from tests.zoo import context
from tests.zoo.entry import Entry
from tests.zoo.table import read

TABLE = Path(__file__).parent.parent / "reports" / "model-types.md"
COUNT = 40


def drawn() -> list[Entry]:
    """Of the types that the table does not say are wrong; a type that leaves it moves no other."""
    rows = [e for e in read(TABLE).values() if e.has("tp")]
    fit = [e for e in random.Random(SEED).sample(rows, len(rows)) if all(map(context.fits, e.context.values()))]
    return fit[:COUNT]


def meshes(e: Entry) -> list[dict[str, int]]:
    """Of two ranks, and of four: with tp where the heads of the default configuration allow it."""
    return [{"cp": 2, "tp": 1}, {"cp": 2, "tp": 2} if e.verdicts["tp2"] == "right" else {"cp": 4, "tp": 1}]


CASES = [(e.name, mesh) for e in drawn() for mesh in meshes(e)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), sampled(CASES, 2))
def test_loss_logits_and_every_gradient(name: str, mesh: dict[str, int]) -> None:
    model, plan = context.model_of(name), read(TABLE)[name].plan
    report = shardplan.verify(model, plan, mesh, sequence_parallel=True if mesh["tp"] > 1 else None, processes=True)
    assert report.proven, report
    assert report.derived is not None and "context_parallel:" in report.derived.text
    assert report.proof is not None and report.proof.processes
    found = {(row.kind, row.name) for row in report.proof.rows}
    assert {kind for kind, _ in found} >= {"output", "gradient"}
    assert {"loss", "logits"} <= {name for kind, name in found if kind == "output"}
