"""The diagnostic codes of the package, by the file that owns each, and the examples of their pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardplan.report.pages import pages

PACKAGE = Path(__file__).parent.parent / "shardplan"
EXAMPLE = re.compile(r"^(Wrong|Right):\n\n```(?:yaml|console|json|python)\n(.*?\n)```$", re.MULTILINE | re.DOTALL)


def examples(code: str) -> dict[str, str]:
    """The examples of a page: "Wrong" and "Right"."""
    return dict(EXAMPLE.findall(pages()[code].body))


@cache
def owned() -> tuple[tuple[str, Path, str], ...]:
    """Each `NAME = Code("SPnnn")`: the code, the file below shardplan/ and the name."""
    texts = ((path, text) for path, text in _texts() if " = Code(" in text)
    return tuple(found for path, text in texts for found in _constants(path, ast.parse(text)))


def codes_in(*folders: str) -> list[str]:
    """The codes that the files of some folders of shardplan/ own."""
    return sorted(code for code, path, _ in owned() if any(path.is_relative_to(folder) for folder in folders))


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """The package's files, below shardplan/."""
    return tuple((path, ast.parse(text)) for path, text in _texts())


def _texts() -> Iterator[tuple[Path, str]]:
    return ((path.relative_to(PACKAGE), path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py")))


def _constants(path: Path, tree: ast.Module) -> Iterator[tuple[str, Path, str]]:
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Name("Code"), [ast.Constant(str(code))])):
                yield code, path, name
