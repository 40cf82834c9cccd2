"""Each diagnostic code has one owner and one page, and the pages have their form."""

import ast
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import yaml

from shardplan.cli.arguments import COMMANDS, parse
from shardplan.report.pages import pages
from tests.code_pages import codes_in, examples, owned, trees

FOLDER = Path(__file__).parent.parent / "docs" / "diagnostics"
WITHOUT_EXAMPLE = {"SP525", "SP555", "SP556", "SP557"}  # what no plan and no command line says


def test_every_code_has_one_owner_and_every_owner_a_page():
    owners = Counter(code for code, _, _ in owned())
    assert {code: n for code, n in owners.items() if n > 1} == {}, "two constants have one code"
    assert owners.keys() - pages().keys() == set(), "write docs/diagnostics/CODE.md"
    assert pages().keys() - owners.keys() == set(), "no rule emits these codes: remove their pages"


def test_every_code_is_emitted():
    """Its constant is read where it stands, or in a file that imports it from there."""
    reads = set()
    for path, tree in trees():
        loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        reads |= {(path.stem, name) for name in loaded}
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(str(module), names):
                    reads |= {(module.rpartition(".")[2], a.name) for a in names if (a.asname or a.name) in loaded}
                case ast.Attribute(ast.Name(module), name):
                    reads.add((module, name))
    assert [f"{path}: {name}" for _, path, name in owned() if (path.stem, name) not in reads] == []


def test_a_code_is_written_where_it_is_owned_alone():
    """Others import the constant, so that who emits and who asks for a code is found by its name."""
    written = {
        path: sorted(
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"SP\d{3}", node.value)
        )
        for path, tree in trees()
    }
    assert {path: codes for path, codes in written.items() if codes and codes != codes_in(str(path))} == {}


@pytest.mark.parametrize("code", pages())
def test_a_page_has_its_form(code: str):
    head, _, body = (FOLDER / f"{code}.md").read_text("utf-8").removeprefix("---\n").partition("---\n")
    page = pages()[code]
    assert yaml.safe_load(head) == {"code": code, "title": page.title}, "a title is plain YAML"
    assert body.startswith(f"\n{page.body}\n")
    assert page.title[:1].islower() or page.title.startswith("FSDP")
    assert len(page.text) > 50 and "```" not in page.text
    assert list(examples(code)) == ([] if code in WITHOUT_EXAMPLE else ["Wrong", "Right"])
    assert page.body.count("\n```") == 2 * len(examples(code))


def test_the_folder_holds_nothing_else():
    assert {path.name for path in FOLDER.iterdir()} == {f"{code}.md" for code in pages()}


@pytest.mark.parametrize("code", pages())
def test_the_commands_of_a_page_exist(code: str):
    """Those of the examples parse; what the text says of a command names one."""
    for line in re.findall(r"^[$#] shardplan (.*)$", "".join(examples(code).values()), re.MULTILINE):
        parse(shlex.split(line, comments=True))
    named = re.findall(r"`shardplan ([a-z]\S*?)[ `]", pages()[code].body)
    assert [word for word in named if word not in COMMANDS] == []
