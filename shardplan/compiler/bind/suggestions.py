"""The real names that a key was probably meant to be: those that differ little, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from shardplan.language.globs import Glob, Segment

MOST = 3  # suggestions, and alternatives of the key that are considered
LONGEST = 60  # characters of a segment, and segments of a key; longer ones are not compared
SIMILAR = 0.6  # of two segments, by difflib's measure; below it they are different words
MISSING = 0.3  # the price of a segment that the key leaves out (a short name); a misspelled one costs its difference
SURPLUS = 0.6  # the price of a segment that the name does not have
FARTHEST = 1.25  # the price up to which a name is suggested: four segments left out, or three words misspelled


def suggestions(glob: Glob, names: Sequence[str]) -> tuple[str, ...]:
    """The nearest names for each alternative of the key, the nearest first; none if nothing is near.

    Args:
        glob: a key that matches nothing.
        names: all names, list indices as `*`.
    """
    found: dict[str, None] = {}
    alternatives = glob.alternatives[:MOST]
    for alternative in alternatives:
        if len(alternative) <= LONGEST:
            priced = sorted((price, name) for name in names if (price := _price(alternative, name)) is not None)
            found.update((name, None) for price, name in priced if price == priced[0][0])
    return tuple(found)[:MOST]


def _price(alternative: tuple[Segment, ...], name: str) -> float | None:
    """The price of changing an alternative into the name, or None if it is too high. The last segments, which carry the
    meaning, must be alike."""
    segments = tuple(name.split("."))
    if _unlike(alternative[-1], segments[-1]) is None:
        return None
    row = [MISSING * i for i in range(len(segments) + 1)]
    for i, wanted in enumerate(alternative, 1):
        above, row = row, [SURPLUS * i]
        for j, segment in enumerate(segments, 1):
            unlike = _unlike(wanted, segment)
            changed = above[j - 1] + unlike if unlike is not None else FARTHEST + 1
            row.append(min(changed, above[j] + SURPLUS, row[j - 1] + MISSING))
    return round(row[-1], 6) if row[-1] <= FARTHEST else None


@lru_cache(maxsize=65536)
def _unlike(wanted: Segment, segment: str) -> float | None:
    """0 for a segment that fits, up to 1 - SIMILAR for a misspelled one, None for another word."""
    if wanted.matches(segment) or (segment == "*" and wanted.text.isdecimal()):
        return 0.0
    if segment == "*" or len(wanted.text) > LONGEST or len(segment) > LONGEST:
        return None
    matcher = SequenceMatcher(None, wanted.text.lower(), segment.lower(), autojunk=False)
    return 1 - matcher.ratio() if matcher.quick_ratio() >= SIMILAR and matcher.ratio() >= SIMILAR else None
