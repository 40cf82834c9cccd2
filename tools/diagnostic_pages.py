"""The page of each diagnostic code: what it means, a command that gives it with what it prints, and the fix."""

from __future__ import annotations

import shlex
from functools import cache

from shardplan.report.catalog import catalog, page
from tests.case_tree import CASES, Case, read

ENDINGS = {"yaml": "yaml", "yml": "yaml", "json": "json", "py": "python"}


def diagnostic_page(code: str) -> str:
    """docs/diagnostics/CODE.md. A code without a case in tests/cases/err has a page without an example run."""
    case = _shortest_case(code)
    return f"# {page(catalog()[code])}\n" + ("" if case is None else "\n" + _run(case))


@cache
def _cases() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for path in sorted((CASES / "err").glob("*.case")):
        found.setdefault(path.name.partition("-")[0], []).append(read(path))
    return found


def _shortest_case(code: str) -> Case | None:
    """The case that is read fastest: the one whose files and output have the fewest characters."""
    return min(
        _cases().get(code, ()), key=lambda case: sum(map(len, (_text(case), *case.files.values()))), default=None
    )


def _text(case: Case) -> str:
    return case.expected or ""


def _run(case: Case) -> str:
    """The files of a case that are text, its command and what it prints."""
    parts = ["## What it prints"]
    for name, content in case.files.items():
        try:
            text = content.decode()
        except UnicodeDecodeError:
            parts.append(f"`{name}` is not text.")
            continue
        if 0 < len(text) <= 3000:  # a file made to be too large is not for reading
            parts.append(f"`{name}`:\n\n{_block(text, ENDINGS.get(name.rpartition('.')[2], ''))}")
    command = f"$ shardplan {shlex.join(case.command)}\n{_text(case)}"
    parts.append(_block(command, "console"))
    return "\n\n".join(parts) + "\n"


def _block(text: str, language: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"
