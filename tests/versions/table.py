"""The table of README.md that says what was run with which releases."""

from __future__ import annotations

import re

HEAD = "| date | Python | torch | transformers | platform | what passed |\n|---|---|---|---|---|---|\n"


def written(text: str, row: tuple[str, str, str, str, str, str]) -> str:
    """The page with a row. Another run of the same releases stands in the same row: in place of what begins with the same words, and of parts
    where all was run now.

    Args:
        row: date, Python, torch, transformers, platform, what passed.
    """
    before, head, after = text.partition(HEAD)
    assert head, "README.md has the table of versions"
    rows = (re.match(r"(\|.*\n)*", after) or [""])[0]
    lines = [_cells(line) for line in rows.splitlines()]
    at = next((i for i, cells in enumerate(lines) if cells[1:5] == row[1:5]), len(lines))
    lines[at : at + 1] = [_joined(lines[at], row) if at < len(lines) else row]
    return before + head + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + after[len(rows) :]


def _joined(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    words, _, _ = new[5].partition(":")
    ends = (words, "`--only") if words.startswith("`make") else words
    kept = [part for part in re.split(r"; (?=`)", old[5]) if not part.startswith(ends)]
    first = re.split(r", | to ", old[0])[0]
    date = new[0] if not kept or first == new[0] else f"{first} to {new[0]}"
    return (date, *new[1:5], "; ".join([*kept, new[5]]))


def _cells(line: str) -> tuple[str, ...]:
    return (*(cell.strip() for cell in line.strip("|").split("|")),)
