"""The environments of pairs of releases, and the row that says what passed."""

import pytest

from tests.versions.environment import Pair, constraints
from tests.versions.table import HEAD, written

ROW = ("2026-11-26", "3.11", "2.13.0+cpu", "5.24.0", "Linux", "`make judge`: all")


def test_a_pair_is_read_and_its_pins_replace_the_projects(monkeypatch):
    pair = Pair.read("2.14.1/5.17.0")
    assert constraints("# text\ntorch==2.13.0+cpu\ntransformers==5.23.0\nnumpy==2.4.6\n", pair).splitlines() == [
        "# text",
        "numpy==2.4.6",
        "torch==2.14.1",
        "transformers==5.17.0",
    ]
    monkeypatch.setattr("tests.versions.environment.version", lambda name: f"{name}'s")
    assert Pair.read("installed/installed") == Pair("torch's", "transformers's")
    with pytest.raises(ValueError, match=r"'2\.14' is no pair: write TORCH/TRANSFORMERS"):
        Pair.read("2.14")


def test_a_row_is_added_once():
    old = "| 2026-01-01 | 3.11 | 2.13.0+cpu | 5.23.0 | Linux | `make test` |\n"
    page = f"# Text\n{HEAD}{old}\nMore.\n"
    first = written(page, ROW)
    assert first == f"# Text\n{HEAD}{old}| {' | '.join(ROW)} |\n\nMore.\n"
    assert written(first, ("2026-12-01", *ROW[1:])) == first.replace("2026-11-26", "2026-12-01")


def test_other_words_for_the_same_releases_stay():
    page = f"{HEAD}| d | 3.11 | 2.13.0+cpu | 5.24.0 | Linux | `make test-all` |\n"
    assert written(page, ROW) == f"{page}| {' | '.join(ROW)} |\n"
