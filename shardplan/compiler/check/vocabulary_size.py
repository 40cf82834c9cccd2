"""A vocabulary that tp does not divide is split in ceil-chunks. That works unless a rank gets no row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity

from .check_words import join
from .facts import Facts
from .stored_by_rules import StoredParameter
from .vocabulary_rows import chunk_rows, leaves_rank_empty, vocabulary_rows

UNEVEN = Code("SP320")
EMPTY = Code("SP321")

MOST_LISTED = 8  # ranks whose rows are listed one by one


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each number of rows."""
    tables: dict[int, list[StoredParameter]] = defaultdict(list)
    for stored in facts.splits:
        if vocabulary_rows(facts, stored):
            tables[stored.size].append(stored)
    for rows, group in tables.items():
        if facts.tp is not None and rows % facts.tp:
            yield _finding(rows, facts.tp, group)


def _finding(rows: int, tp: int, group: list[StoredParameter]) -> Diagnostic:
    empty, size = leaves_rank_empty(rows, tp), chunk_rows(rows, tp)
    # The head's rule is the same with and without the sequence-parallel overlay; the embedding's is not.
    location = group[-1].rule.location
    return Diagnostic(
        code=EMPTY if empty else UNEVEN,
        severity=Severity.ERROR if empty else Severity.WARNING,
        message=f"a vocabulary of {rows} rows leaves rank {-(-rows // size)} of tp={tp} without a row"
        if empty
        else f"tp={tp} does not divide a vocabulary of {rows} rows: {_fill(rows, tp, size)}",
        primary=Label(location, "splits the vocabulary"),
        help="use a smaller tp size, or keep the vocabulary whole with `replicate`"
        if empty
        else f"no change is needed; a vocabulary of {size * tp} rows would be split evenly",
        modules=tuple(dict.fromkeys(name for stored in group for name in stored.assigned)),
    )


def _fill(rows: int, tp: int, size: int) -> str:
    """The rows of the ranks where only the last one gets fewer."""
    last = rows - (tp - 1) * size
    if tp <= MOST_LISTED:
        return f"the ranks get {join([*[str(size)] * (tp - 1), str(last)], 'and')} rows"
    return f"{tp - 1} ranks get {size} rows, the last {last}"
