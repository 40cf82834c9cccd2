"""The word that a misspelled one probably means."""

from __future__ import annotations

import inspect
import unicodedata
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
MAX_NEIGHBOURS = 1000  # names that a misspelt one is compared with
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


def nearest_path(path: Path) -> str | None:
    """A help line with the path nearest to a missing one (folder names count too); None where none is near."""
    found = Path(path.anchor)
    for part in path.parts[len(found.parts) :]:
        if not (found / part).exists():
            try:
                names = [entry.name for entry in islice(found.iterdir(), MAX_NEIGHBOURS)]
            except OSError:
                return None
            near = closest(part, names)
            if near is None or not near.isprintable():
                return None
            part = near
        found /= part
    return did_you_mean(str(path), str(found))


def with_known_names(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with a help in its TypeError about an unknown argument: the known argument most like it."""
    names = inspect.signature(function).parameters

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in names and (near := closest(name, names)) is not None:
                raise TypeError(f"{function.__name__}() has no argument {name!r}: {did_you_mean(name, near)}")
        return function(*args, **options)

    return run
