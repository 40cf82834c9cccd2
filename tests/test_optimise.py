"""Passes over a bound plan: the same numbers, less communication."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardplan.bind import bind
from shardplan.core.layout import I, V
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import ResolvedPlan
from shardplan.layout import LayoutReport, check_layout
from shardplan.layout.model import arrivals_of, reads_of
from shardplan.lower import lower
from shardplan.lower.collectives import expected_collectives
from shardplan.models import hf_tp_plan
from shardplan.optimise import optimise
from shardplan.optimise.sums import merge_sums
from shardplan.parse import from_hf_tp_plan, parse_plan
from shardplan.proof.simulate import simulated_mesh
from shardplan.torchlib.sums import Collects, Waiting
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
    plan = bind(parse_plan("llama").plan, model.tree, MeshSizes(tp=2), sequence_parallel=True)[0]
    assert optimise(plan, check_layout(plan, model.bench)) is plan


def built_in(name: str, *, sequence_parallel: bool) -> tuple[Subject, ResolvedPlan, LayoutReport]:
    model = subject(name, 2)
    plan = bind(parse_plan(name).plan, model.tree, MeshSizes(tp=2), sequence_parallel=sequence_parallel)[0]
    report = check_layout(plan, model.bench)
    assert report.ok
    return model, replace(plan, arrivals=report.arrivals), report


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["cohere", "gptj", "phi"])
def test_parallel_residuals_are_reduced_once(name: str, sp: bool) -> None:
    model, plan, report = built_in(name, sequence_parallel=sp)
    before, after = (expected_collectives(lower(one).modules) for one in (plan, optimise(plan, report)))
    operation = "reduce_scatter" if sp else "all_reduce"
    assert (before["forward"][operation], after["forward"][operation]) == (5, 3)
    assert after["backward"]["reduce_scatter" if sp else "all_reduce"] == 3
    right, _, worst = _numbers(model, optimise(plan, report))
    assert right, worst


def test_blocks_one_after_the_other_are_not_merged() -> None:
    _, plan, report = built_in("llama", sequence_parallel=False)
    assert report.sums == () and optimise(plan, report).sums == {}


def test_a_sum_that_waits_in_vain_would_be_seen() -> None:
    """The proof can fail: attention's part joins the sum of another layer's MLP."""
    model, plan, report = built_in("cohere", sequence_parallel=False)
    merged = optimise(plan, report)
    first, second = merged.sums
    crossed = replace(merged, sums={first: merged.sums[second], second: merged.sums[second]})
    right, _, worst = _numbers(model, crossed)
    assert not right and "were not reduced" not in worst  # layer 1 collects both: a wrong number


def test_a_real_dropout_in_between_keeps_the_reductions_apart() -> None:
    """What waits is not dropped: only where the dropout does nothing are the two the same."""
    model, plan, report = built_in("phi", sequence_parallel=False)
    assert report.sums[0].through
    name = report.sums[0].through[0]
    dropout = plan.tree.modules[name]
    tree = replace(
        plan.tree, modules={**plan.tree.modules, name: replace(dropout, numbers={**dropout.numbers, "p": 0.1})}
    )
    assert set(merge_sums(plan, report).sums) - set(merge_sums(replace(plan, tree=tree), report).sums) == {
        report.sums[0].carriers[0]
    }


def test_a_sum_is_reduced_in_its_own_forward() -> None:
    waiting, x = Waiting(("a",)), torch.ones(2, 4)
    with simulated_mesh(2) as mesh:
        assert waiting.put(x, V(1), mesh).shape == (2, 2)
        assert torch.equal(waiting.take(x), 2 * x)
        assert torch.equal(waiting.put(x, I, mesh), torch.zeros(2, 4))
    waiting.sums.clear()
    with pytest.raises(RuntimeError, match="of a only 0 ran before"):
        waiting.take(x)

    def forward(fail: bool) -> None:
        waiting.sums.append(x)
        if fail:
            raise KeyError("in between")

    around = Collects([waiting])
    with pytest.raises(KeyError):
        around(forward, nn.Identity(), (True,), {})
    assert waiting.sums == []
    with pytest.raises(RuntimeError, match="partial sums of a were not reduced"):
        around(forward, nn.Identity(), (False,), {})
    assert waiting.sums == []


def test_facts_of_the_small_copy_hold_for_all_layers() -> None:
    model = subject("llama", 2)
    plan = transformers_plan(model)
    report = check_layout(plan, model.bench)
    assert set(reads_of(model.tree, report.reads[:2])) == set(report.reads)
    assert arrivals_of(model.tree, report.arrivals) == report.arrivals
