"""Passes over a bound plan: the same numbers, less communication."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardplan.bind import bind
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import ResolvedPlan
from shardplan.layout import check_layout
from shardplan.layout.model import arrivals_of, reads_of
from shardplan.lower import lower
from shardplan.lower.collectives import expected_collectives
from shardplan.models import hf_tp_plan
from shardplan.optimise import optimise
from shardplan.parse import from_hf_tp_plan
from tests.soundness.judge import Subject, _numbers, subject


def transformers_plan(model: Subject) -> ResolvedPlan:
    parsed = from_hf_tp_plan(*hf_tp_plan(model.bench.model))
    return bind(parsed.plan, model.tree, MeshSizes(tp=2), sequence_parallel=False)[0]


@pytest.mark.parametrize(("name", "before", "after"), [("llama", 11, 5), ("qwen3", 13, 7)])
def test_transformers_own_plans_communicate_at_the_minimum(name: str, before: int, after: int) -> None:
    """Two layers have two boundaries each, and one is at the head: 5; q and k norms add one per layer."""
    model = subject(name, 2)
    plan = transformers_plan(model)
    report = check_layout(plan, model.bench)
    assert report.ok
    plain = replace(plan, arrivals=report.arrivals)
    assert expected_collectives(lower(plain).modules)["backward"]["all_reduce"] == before
    merged = optimise(plan, report)
    assert expected_collectives(lower(merged).modules)["backward"]["all_reduce"] == after
    assert check_layout(merged, model.bench).ok
    right, _, worst = _numbers(model, merged)
    assert right, worst


def test_a_plan_with_doors_stays_as_it_is() -> None:
    model = subject("llama", 2)
    from shardplan.parse import parse_plan

    plan = bind(parse_plan("llama").plan, model.tree, MeshSizes(tp=2), sequence_parallel=True)[0]
    assert optimise(plan, check_layout(plan, model.bench)) is plan


def test_facts_of_the_small_copy_hold_for_all_layers() -> None:
    model = subject("llama", 2)
    plan = transformers_plan(model)
    report = check_layout(plan, model.bench)
    assert set(reads_of(model.tree, report.reads[:2])) == set(report.reads)
    assert arrivals_of(model.tree, report.arrivals) == report.arrivals
