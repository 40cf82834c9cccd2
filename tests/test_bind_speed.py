"""Binding and checking take time in proportion to what they look at, and little of it."""

from __future__ import annotations

from time import process_time

import pytest

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan
from tests.examples import plan
from tests.test_bind_names import experts
from tests.trees import llama_405b

EXPERTS = """version: "1"
name: mine
tensor_parallel:
  model.layers.*.mlp.experts.*.{gate,up}_proj: colwise
  model.layers.*.mlp.experts.*.down_proj: rowwise
"""
LISTED = "{" + ",".join(map(str, range(140))) + "}"
WIDE = EXPERTS.replace("model.layers.*", f"model.**.{LISTED}")


def seconds(file: PlanFile, tree: ModuleTree) -> tuple[float, float]:
    """The least time (of the processor) of three runs, for binding and for checking."""
    times = []
    for _ in range(3):
        start = process_time()
        resolved, _ = bind(file, tree, MeshSizes(tp=8))
        bound = process_time()
        check(resolved)
        times.append((bound - start, process_time() - bound))
    return min(t for t, _ in times), min(t for _, t in times)


def test_405b_takes_some_tens_of_milliseconds():
    binding, checking = seconds(parse_plan("llama").plan, llama_405b())
    assert binding < 0.15 and checking < 0.3, "measured: 0.01 s and 0.02 s on an idle machine"


def test_thousands_of_names_are_walked_once():
    tree = experts(layers=20, count=64)
    assert len(tree.modules) + len(tree.parameters) > 8_000
    binding, checking = seconds(plan(EXPERTS), tree)
    assert binding < 0.5 and checking < 1.0, "measured: 0.03 s and 0.07 s on an idle machine"


def test_alternatives_share_their_way():
    tree = experts(layers=4, count=32)
    narrow, _ = seconds(plan(EXPERTS), tree)
    wide, _ = seconds(plan(WIDE), tree)
    assert wide < 12 * narrow + 0.05, "140 times 2 alternatives, walked together"


@pytest.mark.parametrize("file", [plan(EXPERTS)], ids=["experts"])
def test_time_is_linear(file: PlanFile):
    few, many = seconds(file, experts(layers=5, count=32)), seconds(file, experts(layers=40, count=32))
    assert many[0] < 24 * few[0] + 0.02
    assert many[1] < 24 * few[1] + 0.02
