"""The bounds of sizes and counts that users name. Each is checked before anything is computed with the number."""

from __future__ import annotations

from typing import Any

MOST_RANKS = 2**20  # of a mesh and of each of its axes: the largest machines have some 100,000 devices
MOST_PROCESSES = 1024  # started on this machine
MOST_TOKENS = 2**26  # of a sequence: the longest that models are made for have 10 million
MOST_OF_A_NUMBER = 1e24  # bytes, operations or tokens: a million times what the fastest device does in a second
LEAST_SHARE = 1e-6  # of a bound's speed
MOST_SEQUENCES = 2**20  # of a step on all devices, and of one forward
MOST_MICRO_BATCHES = 2**16  # of a step: torch lists the actions of each


def check_count(what: str, value: object, most: int) -> None:
    """Raise ValueError for a value that is not an integer from 1 to `most`.

    Args:
        what: the number's name, at the beginning of the sentence.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be a positive integer, not {_shown(value)}")
    if value > most:
        raise ValueError(f"{what} must be at most {most:,}, not {_shown(value)}")


def check_amount(what: str, value: object, least: float = 1) -> None:
    """Raise ValueError for a value that is not a number from `least` to 1e24."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MOST_OF_A_NUMBER:
        raise ValueError(
            f"{what} must be a positive number, from {least:g} to {MOST_OF_A_NUMBER:g}, not {_shown(value)}"
        )


def check_shares(what: str, value: Any) -> None:
    """Raise ValueError for a value that is not two shares of a bound, the lesser first."""
    two = isinstance(value, tuple) and len(value) == 2
    if (
        not two
        or not all(
            isinstance(one, int | float) and not isinstance(one, bool) and LEAST_SHARE <= one <= 1 for one in value
        )
        or value[0] > value[1]
    ):
        raise ValueError(
            f"{what} must be two shares of the bound, the least first, from {LEAST_SHARE:g} to 1, not {_shown(value)}"
        )


def _shown(value: object) -> str:
    """The value for a message. Python does not write integers of thousands of digits."""
    return "a number of more than 15 digits" if isinstance(value, int) and abs(value) >= 10**15 else f"{value!r:.80}"
