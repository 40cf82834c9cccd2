"""The word that a misspelled one probably means."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 80  # characters: longer texts are not misspelled words, and comparing takes time


def closest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The choice most like the word, ignoring case; None if none is near.

    Args:
        cutoff: how near it must be, 0 to 1 (difflib's ratio).
    """
    if len(word) > LONGEST:
        return None
    spelled = {choice.lower(): choice for choice in choices}
    found = get_close_matches(word.lower(), spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None


def did_you_mean(word: str, near: str) -> str:
    """The help line for a misspelled word. Letters that only look Latin are named, as nobody sees the difference."""
    strange = [c for c in dict.fromkeys(word) if c.isalpha() and not c.isascii()]
    names = [f"`{c}` is {unicodedata.name(c, 'a letter without a name')}" for c in strange[:3]]
    return f"did you mean `{near}`?" + (f" ({', '.join(names)})" if names else "")
