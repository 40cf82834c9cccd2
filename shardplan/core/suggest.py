"""The word that a misspelled one probably means."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 80  # characters: longer texts are not misspelled words, and comparing takes time


def closest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice that is most like the word, upper and lower case aside; None where none is near.

    Args:
        cutoff: how near it must be, 0 to 1 (difflib's ratio).
    """
    if len(word) > LONGEST:
        return None
    spelled = {choice.lower(): choice for choice in choices}
    found = get_close_matches(word.lower(), spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None
