"""The lists of calls in docs/architecture.md are those of the code: a call that is added, removed or moved changes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PACKAGE = ROOT / "shardplan"
LEFT_OUT = ("core", "report", "torchlib")  # rooms whose functions any line may call
SMALL = {"any_error"}


@dataclass(frozen=True)
class Line:
    """A line of a list: a function, the file that it is in, and the functions under it."""

    name: str
    file: str
    under: tuple[Line, ...]


def listed(text: str) -> Iterator[Line]:
    """The lists of a page: blocks of `name  file.py  words`, two blanks deeper under the caller."""
    for block in re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found = [re.fullmatch(r"( *)([\w.]+) +([\w/]+\.py)\b.*", line) for line in block.splitlines()]
        if all(found):
            yield _nested([(len(one[1]) // 2, one[2], one[3]) for one in found if one])


def _nested(lines: list[tuple[int, str, str]]) -> Line:
    (depth, name, file), rest = lines[0], lines[1:]
    starts = [i for i, (at, _, _) in enumerate(rest) if at == depth + 1]
    ends = [*starts[1:], len(rest)] if starts else []
    return Line(name, file, tuple(_nested(rest[i:j]) for i, j in zip(starts, ends, strict=True)))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(path: Path) -> dict[str, tuple[Path, str]]:
    """Name -> the file of the package that it is imported from, and its name there."""
    found, parts = {}, path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else ()
            module = ROOT.joinpath(*base, *(node.module or "").split("."))
            module = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            if module.is_file() and module.is_relative_to(PACKAGE):
                found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return found


def definition(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """Where a name of a file is defined, through files that hand it on."""
    for node in reversed(parsed(path).body):  # the last of overloads
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return path, node
    return definition(*imports(path)[name]) if name in imports(path) else None


def called(path: Path, function: ast.AST, inside: frozenset[ast.AST] = frozenset()) -> Iterator[tuple[str, Path]]:
    """The functions of the package that a function calls, in the order in which they are evaluated. Private functions and
    methods of the same file are replaced with their calls.

    Args:
        inside: the replaced functions around it.
    """
    inside |= {function}
    own = {node.name: node for node in parsed(path).body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in parsed(path).body if isinstance(node, ast.ClassDef)]
    methods = {one.name: one for node in classes for one in node.body if isinstance(one, ast.FunctionDef)}
    calls = [node for part in getattr(function, "body", ()) for node in ast.walk(part) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset)):
        match node.func:
            case ast.Name(id=name) if name in own and name.startswith("_"):
                if own[name] not in inside:
                    yield from called(path, own[name], inside)
            case ast.Name(id=name):
                where = definition(path, name)
                if where is not None and isinstance(where[1], ast.FunctionDef):
                    yield where[1].name, where[0]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner[0].isupper() and owner in imports(path):
                where = definition(path, owner)
                assert where is not None, owner
                yield f"{owner}.{name}", where[0]
            case ast.Attribute(attr=name) if name in methods and methods[name] not in inside:
                yield from called(path, methods[name], inside)


def kept(found: Iterator[tuple[str, Path]]) -> list[tuple[str, str]]:
    """The calls that a list has: each at its first place."""
    named = dict.fromkeys((name, path.relative_to(PACKAGE).as_posix()) for name, path in found)
    return [(name, file) for name, file in named if file.partition("/")[0] not in LEFT_OUT and name not in SMALL]


def defined(line: Line) -> tuple[Path, ast.stmt]:
    where = definition(PACKAGE / line.file, line.name.partition(".")[0])
    assert where is not None and where[0] == PACKAGE / line.file, f"shardplan/{line.file} does not define {line.name}"
    return where


def every(line: Line) -> Iterator[Line]:
    yield line
    for one in line.under:
        yield from every(one)


LISTS = {one.name: one for one in listed(PAGE)}
LINES = [line for one in LISTS.values() for line in every(one)]


def test_the_page_has_two_lists_and_is_two_screens() -> None:
    assert LISTS.keys() == {"validate", "apply_plan"}
    assert len(PAGE.split()) <= 1_000


@pytest.mark.parametrize("line", [line for line in LINES if line.under], ids=lambda line: line.name)
def test_a_list_is_what_the_code_calls(line: Line) -> None:
    assert [(one.name, one.file) for one in line.under] == kept(called(*defined(line)))


def test_every_line_is_a_function_of_its_file() -> None:
    for line in LINES:
        path, node = defined(line)
        owner, _, method = line.name.partition(".")
        names = [one.name for one in getattr(node, "body", ()) if isinstance(one, ast.FunctionDef)]
        assert isinstance(node, ast.FunctionDef) or method in names, (path, owner)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("check_variants(bound.at(tp), seq_len=seq_len)", "bound"),
        ("found, plan = given.both\n", "found, plan = given.both\n    with_context(plan)\n"),
        ("bound = bind_variants(", "allowed_tp(plan)\n    bound = bind_variants("),
    ],
    ids=["removed", "added", "moved"],
)
def test_a_change_of_the_calls_is_noticed(old: str, new: str) -> None:
    path = PACKAGE / "compiler" / "pipeline.py"
    text = path.read_text("utf-8")
    text = text[text.index("def at_a_size(") :]
    assert text.count(old) == 1
    before, after = (ast.parse(one).body[0] for one in (text, text.replace(old, new)))
    assert kept(called(path, before)) == kept(called(*defined(next(one for one in LINES if one.name == "at_a_size"))))
    assert kept(called(path, after)) != kept(called(path, before))


def test_the_phases_are_those_of_the_code() -> None:
    (phases,) = (
        node.value
        for node in parsed(PACKAGE / "runtime" / "apply" / "phases.py").body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PHASES"
    )
    assert isinstance(phases, ast.Tuple)
    names = [ast.literal_eval(pair.elts[0]) for pair in phases.elts if isinstance(pair, ast.Tuple)]
    said = PAGE.partition("The phases of `apply_program`: ")[2].partition(".")[0]
    assert said.replace("\n", " ").split(", ") == names


def test_the_hour_has_twelve_files_with_what_it_names() -> None:
    text = (ROOT / "docs" / "an-hour-with-the-code.md").read_text("utf-8")
    items = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^\S)", text, re.DOTALL | re.MULTILINE)
    assert [int(number) for number, _ in items] == list(range(1, 13))
    for number, item in items:
        paths = [ROOT / path for path in re.findall(r"`([\w/]+\.(?:py|yaml))`", item)]
        found = " ".join(path.read_text("utf-8") for path in (*paths, ROOT / "plans" / "llama.yaml"))
        names = re.findall(r"`([A-Za-z_]+)`", item)
        assert paths and [name for name in names if not re.search(rf"\b{name}\b", found)] == [], number
