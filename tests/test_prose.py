"""The words of the prose: four of an older dialect of this project had to be read twice, and do not come back."""

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
    """The docstrings and comments of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
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


def test_the_words_are_found() -> None:
    text = '"""What stands for a name, behind it."""\nx = 1  # beside y, of which there are two\n'
    assert sum(len(DIALECT.findall(one)) for one in prose(text)) == 4
