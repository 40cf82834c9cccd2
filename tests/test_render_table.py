"""Tables: alignment, folding, colours."""

import pytest

from shardplan.report.color import Paint
from shardplan.report.table import table

ROWS = [("name", "size"), ("  weight of it", "1,024"), ("\u6a21\u578b", "3"), ("", "")]


def test_alignment():
    assert table(ROWS, right=(1,)) == [
        "name             size",
        "  weight of it  1,024",
        "\u6a21\u578b                3",
        "",
    ]


def test_long_cells_are_folded_at_blanks_and_keep_their_indent():
    assert table(ROWS, right=(1,), width=15) == [
        "name       size",
        "  weight  1,024",
        "  of it",
        "\u6a21\u578b          3",
        "",
    ]


def test_words_that_are_too_long_are_folded():
    assert table([("abcdefghij", "x")], width=8) == ["abcde  x", "fghij"]


@pytest.mark.parametrize("name", ["NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"])
@pytest.mark.parametrize("value", ["1", "dumb"])
def test_colours_are_those_of_the_cells_whatever_the_environment(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert table([(Paint(True)("good", "equal"), "x" * 200)]) == [f"\x1b[1;32mequal\x1b[0m  {'x' * 200}"]
    assert table([(Paint(False)("good", "equal"), "x")]) == ["equal  x"]


def test_nothing_in_a_cell_is_markup():
    assert table([("[bold]a[/bold] :smile: model.layers[0] 12 https://x.y", "b")]) == [
        "[bold]a[/bold] :smile: model.layers[0] 12 https://x.y  b"
    ]
