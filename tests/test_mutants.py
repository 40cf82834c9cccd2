"""A sample of the mutants of the run-time; `make mutants` judges more."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections import Counter

import pytest

from tests.mutants import of_code
from tests.mutants.__main__ import Row, drawn
from tests.mutants.by_tests import Tests, copied
from tests.mutants.near_tests import near
from tests.mutants.plans import CASES
from tests.mutants.sites import OPERATORS, ROOT, Site, sites

SAMPLE = 24
EXCHANGE = "shardplan/runtime/parallel/expert_exchange.py"


@pytest.fixture(scope="module")
def moves() -> list[Site]:
    """Of the run-time."""
    return sites()


@pytest.fixture(scope="module")
def code() -> list[Site]:
    return sites("code")


def changed(site: Site) -> Counter[str]:
    """The lines that only the changed code has, or has once more."""
    before = ast.unparse(ast.parse((ROOT / site.path).read_text()))
    return Counter(ast.unparse(site.tree()).splitlines()) - Counter(before.splitlines())


def test_each_operator_finds_what_moves_values(moves: list[Site]):
    assert {site.operator for site in moves} == {*OPERATORS}
    wanted = {
        ("swap", "route.back", "route"),
        ("drop", "ctx.back.exchange(g)", "g"),
        ("group", "self.group", "another_group(self.group)"),
    }
    assert wanted <= {(site.operator, site.before, site.after) for site in moves if site.path == EXCHANGE}
    move = [site for site in moves if site.path.endswith("tensor_moves.py") and "ops.back" in site.before]
    assert {site.operator for site in move} == {"drop", "swap"}


@pytest.mark.parametrize("number", range(SAMPLE))
def test_a_mutant_is_the_code_with_one_change(number: int, moves: list[Site], code: list[Site]):
    each = SAMPLE // 2
    site = (random.Random(5).sample(moves, each) + random.Random(5).sample(code, each))[number]
    assert 0 < changed(site).total() <= site.lines[1] - site.lines[0] + 4


def test_what_is_drawn_begins_with_all_parts_and_operators(moves: list[Site]):
    order = list(drawn(3, moves))
    assert order == list(drawn(3, moves)) != list(drawn(4, moves))
    strata = {(site.area, site.operator) for site in moves}
    assert {(site.area, site.operator) for site in order[: len(strata)]} == strata
    assert len(order) == len({*order}) == len(moves)


def test_all_code_of_three_rooms_is_changed(code: list[Site]):
    assert {site.operator for site in code} == {*of_code.OPERATORS}
    assert {site.path.split("/")[1] for site in code} == {"weights", "runtime", "cli"}
    assert not any(site.before == site.after for site in code)


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("weights/folders", "folders"),
        ("cli/fit_command", "fit"),
        ("runtime/training/expert_bias", "processes_expert_bias"),
    ],
)
def test_the_nearest_tests_are_asked_first(path, file):
    assert f"tests/test_{file}.py" in near(f"shardplan/{path}.py")[:4]


@pytest.mark.slow
def test_a_test_that_runs_a_change_kills_it_and_what_it_runs_is_remembered(code: list[Site], tmp_path):
    """One change that tests of a file see, and one that none of them runs."""
    those = [site for site in code if site.path == "shardplan/runtime/parallel/process_groups.py"]
    named = next(site for site in those if site.function == "named_ranks" and site.before == "verbs")
    other = next(site for site in those if site.function == "unflatten")
    file = "tests/test_watch_ranks.py"
    with copied() as copy:
        tests = Tests(copy, [named, other], tmp_path / "mutants.json")
        reached, _ = tests._reaching(named, file)
        assert f"{file}::test_a_rank_that_has_not_begun_is_named" in reached
        assert tests._reaching(other, file)[0] == []
        assert copy.kills({named.path: (ROOT / named.path).read_text()}, file, reached, 60.0) == ""
        assert copy.kills({named.path: ast.unparse(named.tree())}, file, reached, 60.0) in reached
        copy.run = None  # nothing runs once more
        assert Tests(copy, [named, other], tmp_path / "mutants.json")._reaching(named, file)[0] == reached


def test_one_that_passes_needs_a_reason(moves: list[Site]):
    assert Row(moves[0], CASES[0], "passes", "").problem == "HOLE"
    assert (
        Row(moves[0], CASES[0], "passes", "it is equal").problem
        == Row(moves[0], CASES[0], "refused", "SP422").problem
        == ""
    )


@pytest.mark.slow
def test_mutants_are_refused():
    drawn = ["--count", "5", "--seed", "1", "--models", "olmo2", "--only", "tensor_moves"]
    command = [sys.executable, "-m", "tests.mutants", *drawn]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    # The other one changes no number (tests/mutants/equal.py says why).
    assert done.stdout.count("| refused |") == 4 and "0 problems" in done.stdout, done.stdout
