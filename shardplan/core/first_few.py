"""Long lists in words: the first few, and how many more there are."""

from collections.abc import Iterable


def first_few(lines: Iterable[str], most: int = 5) -> tuple[str, ...]:
    """The first lines of a finding's notes, then "and 3 more" where there are more."""
    every = tuple(lines)
    return (*every[:most], f"and {len(every) - most} more") if len(every) > most else every


def in_a_row(items: Iterable[object], most: int) -> str:
    """The first items of a list, "a, b, c and 3 more"."""
    every = list(map(str, items))
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
