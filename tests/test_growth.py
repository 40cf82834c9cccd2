"""What grows with the model and with the plan, counted: calls of Python functions and collectives, not seconds."""

import sys
from collections.abc import Callable

import pytest

import shardplan
from benchmarks.growth import EXPERTS, RULES, explicit, model
from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.core.mesh import MeshSizes
from shardplan.core.tree import ModuleTree
from shardplan.language import globs, lint_plan, parse_text
from shardplan.runtime.apply.phases import PHASES
from tests.collective_counter import CollectiveCounter
from tests.proofs import fake_mesh
from tests.small_models import small_model


def calls(run: Callable[[], object]) -> int:
    """How many Python and C functions are called."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def parsed_bound_checked(text: str, tree: ModuleTree) -> Callable[[], object]:
    def run() -> None:
        globs.parse_glob.cache_clear()
        plan = parse_text(text).plan
        resolved, about = bind(plan, tree, MeshSizes(tp=8))
        assert not [d for d in (*about, *check(resolved)) if d.is_error]

    return run


SERIES = {
    "layers": lambda n: (RULES, model(8 * n)),
    "rules": lambda n: (explicit(35 * n), model(40)),
    "experts": lambda n: (EXPERTS, model(2, 16 * n)),
}


@pytest.mark.parametrize("what", SERIES)
def test_calls_grow_in_proportion(what):
    parsed_bound_checked(*SERIES[what](1))()  # what is imported and made once
    few, more, most = (calls(parsed_bound_checked(*SERIES[what](n))) for n in (1, 3, 7))
    assert most - more <= 2.04 * (more - few), (few, more, most)
    assert more - few > 100


def test_calls_of_lint_grow_in_proportion(tmp_path):
    files = {n: tmp_path / f"{n}.yaml" for n in (100, 300, 700)}
    for n, file in files.items():
        file.write_text(explicit(n), "utf-8")
        lint_plan(file)
    globs.parse_glob.cache_clear()
    few, more, most = (calls(lambda file=file: lint_plan(file)) for file in files.values())
    assert most - more <= 2.04 * (more - few), (few, more, most)
    assert more - few > 200


def test_a_pattern_is_read_once(tmp_path, monkeypatch):
    read = []
    original = globs._read
    monkeypatch.setattr(globs, "_read", lambda pattern: read.append(pattern) or original(pattern))
    globs.parse_glob.cache_clear()
    file = tmp_path / "plan.yaml"
    file.write_text(RULES, "utf-8")
    assert lint_plan(file).plan is not None
    assert sorted(read) == sorted(set(read)) and len(read) == 2  # those with braces


def test_this_test_can_fail():
    def quadratic(n: int) -> Callable[[], object]:
        return lambda: [len("") for _ in range(n) for _ in range(n)]

    few, more, most = (calls(quadratic(n)) for n in (10, 30, 70))
    assert most - more > 2.04 * (more - few)


def sent_while_applying(src_data_rank: int | None) -> dict[str, int]:
    with fake_mesh(2, 4, names=("dp_shard", "tp")) as mesh, CollectiveCounter() as counter:
        options = {"sequence_parallel": True, "src_data_rank": src_data_rank, "prove": False}
        shardplan.apply_plan(small_model("llama"), mesh, "llama", **options)
    return dict(counter.counts)


def test_weights_that_every_rank_has_are_not_sent():
    sent = sent_while_applying(0)
    assert sent["scatter"] == 16 and sent["broadcast"] == 5, "matrices and norms of a llama of two layers"
    # Over each of two axes: whether all ranks compiled the same, and go on, before the phases and after each of them; and one number for
    # each parameter, which tells whether the ranks drew the same weights.
    assert sent_while_applying(None) == {"all_reduce": 2 * (2 + len(PHASES) + 1)}
