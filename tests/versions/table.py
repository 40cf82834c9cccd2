"""The table of README.md that says what was run with which releases."""

from __future__ import annotations

import re

HEAD = "| date | Python | torch | transformers | platform | what passed |\n|---|---|---|---|---|---|\n"


def written(text: str, row: tuple[str, str, str, str, str, str]) -> str:
    """The page with a row: in place of one that has the same releases and begins with the same words, or as the last.

    Args:
        row: date, Python, torch, transformers, platform, what passed.
    """
    before, head, after = text.partition(HEAD)
    assert head, "README.md has the table of versions"
    rows = (re.match(r"(\|.*\n)*", after) or [""])[0]
    kept = [line for line in rows.splitlines() if _key(line) != _key(_line(row))]
    return before + head + "\n".join([*kept, _line(row)]) + "\n" + after[len(rows) :]


def _line(row: tuple[str, ...]) -> str:
    return f"| {' | '.join(row)} |"


def _key(line: str) -> tuple[str, ...]:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return (*cells[1:5], cells[5].partition(":")[0])
