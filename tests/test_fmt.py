"""`shardplan fmt`: what a plan says and its comments stay, and a formatted plan stays as it is."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardplan.cli.main import main
from shardplan.language.format_plan import format_plan
from shardplan.language.nodes import to_data
from shardplan.language.plan_texts import value_text, word_text
from shardplan.language.reader import read_document
from tests.case_tree import ROOT, cases
from tests.sampling import examples

PLANS = sorted((ROOT / "plans").glob("*.yaml"))
UGLY = """\


# top
version:   "1"
name:  mine   #the name

description: |
    two

      lines
models: [a,  b]
tensor_parallel:
      #first
      a.b:    colwise   #why
      c:
            style: rowwise
            optional:   true
      d: {style: colwise,
          optional: true}
      e:
      - {style: colwise, when: x}
      -   style: rowwise
          when: not x
# about data
data_parallel:
    units:
        - a.*
        -   b.*


    backend: fsdp2



"""
PRETTY = """\
# top
version: "1"
name: mine  # the name

description: |
    two

      lines
models: [a,  b]

tensor_parallel:
  # first
  a.b: colwise  # why
  c:
    style: rowwise
    optional: true
  d: {style: colwise,
      optional: true}
  e:
    - {style: colwise, when: x}
    -   style: rowwise
        when: not x

# about data
data_parallel:
  units:
    - a.*
    -   b.*

  backend: fsdp2
"""


def test_one_form():
    assert format_plan(UGLY) == PRETTY
    assert format_plan(PRETTY) == PRETTY
    assert format_plan(UGLY.replace("\n", "\r\n")) == PRETTY


def same(text: str) -> None:
    made = format_plan(text)
    before, after = read_document(text, "x").root, read_document(made, "x").root
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert to_data(before) == to_data(after)
    assert format_plan(made) == made
    assert text.count("#") == made.count("#")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_built_in_plans_say_the_same(path: Path):
    same(path.read_text("utf-8"))


def test_wrong_plans_say_the_same():
    for case in cases():
        for name, content in case.files.items():
            if name.endswith(".yaml"):
                same(content.decode("utf-8", "replace"))


WORDS = st.sampled_from(
    ["a", "b.*", '"*.c"', "x: y", "- z", "{s: t}", "[u, v]", "#n", " # m", "|", ">-", "'q'", "k:", "&w 1", "*w"]
)
LINES = st.lists(st.tuples(st.integers(0, 6), WORDS, WORDS).map(lambda t: " " * t[0] + t[1] + ": " + t[2]), max_size=8)


@settings(max_examples=examples(300), deadline=None)
@given(LINES)
def test_whatever_the_text_is(lines):
    same("\n".join(lines))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("plans").mkdir()
    ugly, pretty = Path("plans/ugly.yaml"), Path("plans/pretty.yaml")
    ugly.write_text(UGLY)
    pretty.write_text(PRETTY)
    Path("plans/other.json").write_text("{}")
    assert main(["fmt", "plans", "--check"]) == 1
    assert capsys.readouterr().out == "plans/ugly.yaml: would be formatted\n" and ugly.read_text() == UGLY
    assert main(["fmt", "plans", "--diff"]) == 1
    assert "+  a.b: colwise  # why" in capsys.readouterr().out and ugly.read_text() == UGLY
    assert main(["fmt", "plans"]) == 0
    assert capsys.readouterr().err == "1 of 2 files formatted\n" and ugly.read_text() == PRETTY
    assert main(["fmt", "plans", "--check"]) == 0
    ugly.write_text("a: [\n")
    assert main(["fmt", "plans"]) == 1 and "SP102" in capsys.readouterr().out
    assert main(["fmt", "no.yaml"]) == 1 and "SP101" in capsys.readouterr().out
    assert main(["fmt", "llama"]) == 2


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8))
@example("0:?")
def test_a_text_is_written_as_it_is_read(word: str) -> None:
    """In what `init` writes, and in the lines that findings propose: `4`, `{a,b}`, `no: x`."""
    root = read_document(f"a: {word_text(word)}\nb: {value_text([word, {'c': word}])}\n", "made.yaml").root
    assert root is not None and to_data(root) == {"a": word, "b": [word, {"c": word}]}
