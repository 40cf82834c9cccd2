"""Text rendering, character by character."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity, Span
from shardplan.core.report import Report, as_errors, count_text, ordered
from shardplan.core.sources import SourceFile, SourceMap
from shardplan.report import report_text, text, wants_color
from shardplan.report.short_names import brace_names, fold_names
from shardplan.report.width import cells, display_width, printable
from tests.render_samples import IN_DICT, NO_PLACE, PARTIAL, SOURCES, at

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(*diagnostics: Diagnostic) -> list[str]:
    return text(diagnostics, SOURCES, color=False).split("\n")


def marked(*labels: Label) -> list[str]:
    """The lines under the arrow of a finding with these labels."""
    return plain(Diagnostic("SP100", Severity.ERROR, "m", labels[0], labels[1:]))[2:]


def test_everything_that_a_finding_has():
    assert plain(PARTIAL) == [
        "error[SP301]: num_key_value_heads is 4, which tp=3 does not divide",
        "  --> my.yaml:3:3",
        "   3 |   model.layers.*.self_attn.{q,k,v}_proj: colwise",
        "     |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^  ------- this style",
        "     |   splits the heads",
        "     = model.layers.0.self_attn: num_key_value_heads is 4",
        "     = where: model.layers.0-31.self_attn.{q_proj,k_proj,v_proj} (96 in all)",
        "     = help: use a tp of 1, 2 or 4",
        "note: inherited from here",
        "  --> parent.yaml:7:6",
        "   7 |   a: b",
        "     |      ^",
    ]


def test_a_plan_without_text_is_shown_by_its_path_and_cannot_write_to_the_terminal():
    assert plain(IN_DICT) == [
        "warning[SP201]: the key ␛[31mred␛[0m matches nothing",
        '  --> <dict>["tensor_parallel"]["red"][0]',
        "     = no such module",
    ]


def test_a_finding_without_a_place():
    assert plain(NO_PLACE) == [
        "error[SP501]: there is no model here",
        "     = help: name one",
        "             or another",
    ]


def test_findings_come_in_the_order_of_lines_those_without_a_place_last_and_each_once():
    late = Diagnostic("SP100", Severity.ERROR, "late", at(7, 3, 7, 4))
    assert ordered([NO_PLACE, late, IN_DICT, PARTIAL, late], SOURCES) == (PARTIAL, late, IN_DICT, NO_PLACE)


def test_wide_characters_and_tabs_are_underlined_where_they_are_seen():
    source, marks, hanging = marked(at(4, 3, 4, 5, "wide"), at(4, 14, 4, 21, "tab"))
    assert source == "   4 |   模型.layers:  colwise"  # the tab ends at column 16: two blanks
    assert marks == "     |   ^^^^          ------- tab"
    assert hanging == "     |   wide"
    assert display_width(source[: source.index("colwise")]) == marks.index("-")


def test_lines_between_marks_are_left_out():
    assert marked(at(1, 1, 1, 8, "here"), at(7, 3, 7, 4, "there")) == [
        '   1 | version: "1"',
        "     | ^^^^^^^ here",
        " ...",
        "   7 |   a: b",
        "     |   - there",
    ]


def test_a_long_line_is_cut_around_the_mark():
    source, marks = marked(at(6, 204, 6, 209, "here"))
    assert len(source) <= 120
    assert source.startswith("   6 | ...y") and source.endswith("w...")
    assert source[marks.index("^") : marks.rindex("^") + 1] == "ZZZZZ"


def test_a_mark_longer_than_the_line_can_show_is_clipped():
    source, marks = marked(at(6, 4, 6, 309))
    assert len(marks) <= len(source)


def test_a_span_over_lines_is_marked_to_the_end_of_its_first():
    assert marked(at(1, 10, 3, 5, "from here")) == ['   1 | version: "1"', "     |          ^^^ from here"]


def test_a_place_after_the_end_of_the_text_still_gets_a_mark():
    assert marked(at(9, 1, 9, 1, "end of file")) == ["   9 |", "     | ^ end of file"]


def test_labels_that_overlap_and_hang():
    assert marked(at(3, 3, 3, 40, "whole"), at(3, 3, 3, 8, "model"), at(3, 9, 3, 15, "layers")) == [
        "   3 |   model.layers.*.self_attn.{q,k,v}_proj: colwise",
        "     |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ whole",
        "     |   |     layers",
        "     |   model",
    ]


def test_line_numbers_of_five_digits_widen_the_gutter():
    lines = ("",) * 12344 + ("a: b",)
    sources = SourceMap({"long.yaml": SourceFile("long.yaml", lines)})
    label = Label(Location("long.yaml", span=Span(12345, 1, 12345, 2)))
    shown = text([Diagnostic("SP100", Severity.ERROR, "m", label, help="h")], sources, color=False).split("\n")
    assert shown[1:] == ["   --> long.yaml:12345:1", "12345 | a: b", "      | ^", "      = help: h"]


def test_color_changes_no_character():
    everything = [PARTIAL, IN_DICT, NO_PLACE]
    colored = text(everything, SOURCES, color=True)
    assert colored != text(everything, SOURCES, color=False)
    assert ANSI.sub("", colored) == text(everything, SOURCES, color=False)


class Terminal:
    def __init__(self, tty: bool):
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


@pytest.mark.parametrize(
    ("tty", "env", "color"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_when_to_color(tty, env, color):
    assert wants_color(Terminal(tty), env) is color


def test_the_last_lines_of_a_report():
    assert report_text(Report(), color=False) == "no findings"
    assert report_text(Report(allowed_tp=(1, 2, 4)), color=False) == "no findings\ntp: 1, 2, 4 (by size alone)"
    layouts = Report(allowed_tp=(1, 2, 4), checked_tp=2, stages=("plan", "structure", "layouts"))
    assert layouts.tp_lines == ("tp: 1, 2, 4 (checked at 2; the others by size alone)",)
    assert replace(layouts, diagnostics=(NO_PLACE,)).tp_lines == ("tp: 1, 2, 4 (by size alone; refused at 2)",)
    report = Report(diagnostics=(NO_PLACE, PARTIAL, IN_DICT), sources=SOURCES, allowed_tp=())
    assert report_text(report, color=False).endswith("\n\n2 errors, 1 warning\ntp: none (by size alone)")
    assert count_text([IN_DICT]) == "1 warning"


def test_strict_makes_every_warning_an_error():
    assert Report(diagnostics=(IN_DICT,)).ok
    assert not Report(diagnostics=as_errors([IN_DICT])).ok


def test_names_are_folded_exactly():
    names = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in range(4)]
    assert fold_names(names) == ("layers.0-2.experts.0-3.w",)
    assert fold_names(names[:-1]) == ("layers.0-1.experts.0-3.w", "layers.2.experts.0-2.w")
    assert fold_names(["a.1", "a.3", "a.4", "b", "a.10"]) == ("a.1,3-4,10", "b")
    assert brace_names(["a.q", "a.k", "b", "c"]) == ("a.{q,k}", "{b,c}")


def test_a_single_module_that_the_sentence_names_is_not_repeated():
    finding = replace(NO_PLACE, message="lm_head is whole", modules=("lm_head",))
    assert not any("where" in line for line in plain(finding))


@given(st.text())
def test_any_text_is_shown_on_one_line_and_measured(value):
    shown = printable(value)
    assert "\n" not in shown and "\x1b" not in shown and "\u202e" not in shown
    pieces, starts = cells(value)
    assert len(pieces) == len(value) and starts[-1] == display_width("".join(pieces))


@given(st.text(max_size=300), st.integers(1, 400), st.integers(1, 400), st.integers(1, 3))
def test_any_span_in_any_line_is_rendered(line, column, end_column, end_line):
    sources = SourceMap({"f": SourceFile("f", (line,))})
    label = Label(Location("f", span=Span(1, column, end_line, end_column)), "here")
    shown = text([Diagnostic("SP100", Severity.ERROR, "m", label)], sources, color=False).split("\n")
    assert len(shown) == 4 and shown[3].endswith("^ here")
