"""Reports as data: the findings of a plan's two variants."""

from dataclasses import replace

from shardplan.core.diagnostics import Diagnostic, Label, Location, Severity
from shardplan.core.report import of_both_variants

FILE = "mine.yaml"
DOWN = Label(Location(FILE, ("tensor_parallel", "down_proj")), "splits it")
DOWN_SEQ = Label(Location(FILE, ("sequence_parallel", "down_proj")), "splits it")
UNEVEN = Diagnostic("SP303", Severity.ERROR, "intermediate_size is 97, which tp=2 does not divide", DOWN)


def test_a_finding_of_both_comes_once():
    assert of_both_variants([UNEVEN], [UNEVEN]) == (UNEVEN,)


def test_the_same_of_two_lines_names_both():
    (one,) = of_both_variants([UNEVEN], [replace(UNEVEN, primary=DOWN_SEQ)])
    assert one.primary == DOWN
    assert one.related == (replace(DOWN_SEQ, text="the same with sequence parallelism"),)


def test_a_finding_of_one_says_which():
    (without,) = of_both_variants([UNEVEN], [])
    assert without.notes == ("only without sequence parallelism",)
    (overlay,) = of_both_variants([], [UNEVEN])
    assert overlay.notes == ("only with sequence parallelism",)


def test_a_line_of_the_overlay_says_it_itself():
    in_overlay = replace(UNEVEN, primary=DOWN_SEQ)
    assert of_both_variants([], [in_overlay]) == (in_overlay,)


def test_different_findings_stay_apart():
    other = replace(UNEVEN, modules=("model.layers.0.mlp.down_proj",))
    assert [d.notes for d in of_both_variants([UNEVEN], [other])] == [
        ("only without sequence parallelism",),
        ("only with sequence parallelism",),
    ]
