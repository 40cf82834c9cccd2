"""Names that differ in one segment, written as one: `layers.*.{q,k}_proj`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from .by_key import by_key

Row = tuple[str, ...]  # the segments of a name


def folded(
    names: Iterable[str], joins: Callable[[Row, int], bool], words: Callable[[Sequence[str]], str]
) -> dict[str, list[int]]:
    """The names, in the order of their first, where those that differ in one segment are one; later segments are joined first. Each has
    the positions of the names that it stands for, and spells no other name.

    Args:
        joins: whether a name may be joined with others that differ in the segment at a position.
        words: different segments as one; a segment alone stays.
    """
    rows = by_key((tuple(name.split(".")), number) for number, name in enumerate(names))
    for at in reversed(range(max(map(len, rows), default=0))):
        alike = by_key((_but(row, at) if at < len(row) and joins(row, at) else row, row) for row in rows)
        rows = {
            first if not others else (*first[:at], words([row[at] for row in (first, *others)]), *first[at + 1 :]): [
                number for row in (first, *others) for number in rows[row]
            ]
            for first, *others in alike.values()
        }
    return {".".join(row): numbers for row, numbers in rows.items()}


def _but(row: Row, at: int) -> Row:
    return (*row[:at], "", *row[at + 1 :])


def brace(words: Sequence[str]) -> str:
    """`{q_proj,k_proj}`."""
    return f"{{{','.join(words)}}}"


def braced(words: Sequence[str]) -> str:
    """As `brace`, but what they share up to an underscore or a number is written once: `{q,k}_proj`."""
    if len(words) == 1 or any("{" in word for word in words):
        return words[0] if len(words) == 1 else brace(words)
    head, tail = os.path.commonprefix(words), os.path.commonprefix([word[::-1] for word in words])[::-1]
    if not all(word[len(head) :].isdigit() for word in words):
        head = head[: head.rfind("_") + 1]
    tail = tail[tail.find("_") :] if "_" in tail else ""
    inner = [word[len(head) : len(word) - len(tail)] for word in words]
    return f"{head}{brace(inner)}{tail}" if all(inner) else brace(words)


def in_last(row: Row, at: int) -> bool:
    """For `folded`: names that differ in their last segment are joined."""
    return at == len(row) - 1
