"""The words of the prose: four of an older dialect of this project had to be read twice, and do not come back.

They are looked for in docstrings, comments and messages, in the pages and in the comments of plans."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.doc_blocks import ROOT

DIALECT = re.compile(r"\b(behind|beside|of which|stands (?:for|in|behind|beside|there))\b", re.IGNORECASE)
MOST = 10  # arguments with such a name, and what is literal


def prose(text: str) -> Iterator[str]:
    """The docstrings, messages and comments of a module; a name alone is none."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def test_the_package_is_written_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {said.group()}: ...{one[max(said.start() - 40, 0) : said.end() + 20]!r}"
        for path in sorted((ROOT / "shardplan").rglob("*.py"))
        for one in prose(path.read_text("utf-8"))
        for said in DIALECT.finditer(one)
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_pages_and_plans_are_written_in_plain_words() -> None:
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "plans").glob("*.yaml"),
    ]
    assert len(files) > 300
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:120]}"
        for path in sorted(files)
        for line in path.read_text("utf-8").splitlines()
        if DIALECT.search(line)
    ]
    assert found == []


def test_the_words_are_found() -> None:
    text = '"""What stands for a name, behind it."""\nx = 1  # beside y, of which there are two\n'
    assert sum(len(DIALECT.findall(one)) for one in prose(text)) == 4
