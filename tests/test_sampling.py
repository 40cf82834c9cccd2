"""What `moved.txt` moves, and what of it stays."""

from argparse import Namespace

import pytest

from tests import sampling


@pytest.mark.parametrize(("count", "share"), [(23, 5), (3, 5), (1, 2), (6, 6), (7, 1), (0, 3)])
def test_as_many_seeds_as_shares_have_all_cases_together(count, share):
    cases = [f"case {index}" for index in range(count)]
    for turn in (0, 1, 7):
        seeds = range(turn * share, (turn + 1) * share)
        drawn = [sampling.share_of(cases, Namespace(share=share, seed=seed)) for seed in seeds]
        assert sorted({one for part in drawn for one in part}) == sorted(cases)
        assert all(part == [one for one in cases if one in part] for part in drawn)
        assert sum(map(len, drawn)) == max(count, share if count else 0) and all(drawn) == bool(count)


class Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, mark: str) -> bool:
        return mark in self.marks

    def add_marker(self, mark: str) -> None:
        self.marks.append(mark)


@pytest.fixture
def moved(tmp_path, monkeypatch):
    def write(text: str) -> None:
        monkeypatch.setattr(sampling, "MOVED", tmp_path / "moved.txt")
        (tmp_path / "moved.txt").write_text(text, "utf-8")

    return write


def test_what_is_named_is_moved_and_a_part_of_it_stays(moved):
    moved("# why\n\nslow: x\ntests/a.py::test[b c]\ntests/b.py::test\n\nexhaustive: y\ntests/c.py::test 3\n")
    every = [Item(f"tests/{file}.py::test[{one}]") for file in "ab" for one in ("b c", "d")]
    every += [Item(f"tests/c.py::test[{i}]", *(["slow"] if i % 2 else [])) for i in range(10)]
    assert sampling.move(every) == []
    assert [item.nodeid for item in every[:4] if item.marks == ["slow"]] == [
        "tests/a.py::test[b c]",
        "tests/b.py::test[b c]",
        "tests/b.py::test[d]",
    ]
    drawn = [item for item in every if "exhaustive" in item.marks]
    assert len(drawn) == 2 and all(item.marks == ["slow", "exhaustive"] for item in drawn)
    again = [Item(item.nodeid, *(["slow"] if i % 2 else [])) for i, item in enumerate(every[4:])]
    sampling.move(again)
    assert [item.marks for item in again] == [item.marks for item in every[4:]]


def test_a_line_that_moves_nothing_is_told(moved):
    moved("slow: x\ntests/a.py::test_gone\ntests/a.py::test 2\ntests/a.py::test 1\n")
    items = [Item("tests/a.py::test[1]"), Item("tests/a.py::test[2]")]
    assert sampling.move(items) == ["tests/a.py::test_gone", "tests/a.py::test 2"]
    assert sum(item.marks == ["slow"] for item in items) == 1


def test_every_line_moves_something(pytestconfig):
    assert pytestconfig.idle_lines == []
