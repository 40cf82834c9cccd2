"""The meaning of a plain scalar: the core schema of YAML 1.2 (section 10.3.2 of the specification).

`no` and `on` are text, `1e3` is a number, `0o17` is 15.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .nodes import Value

MAX_DIGITS = 15  # of a whole number; nothing in a plan is larger, and every such number is exact as a float

_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o([0-7]+)")
_HEX = re.compile(r"0x([0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")

TAGS: dict[str, Callable[[object], bool]] = {
    "tag:yaml.org,2002:null": lambda value: value is None,
    "tag:yaml.org,2002:bool": lambda value: isinstance(value, bool),
    "tag:yaml.org,2002:int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "tag:yaml.org,2002:float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
TEXT_TAGS = ("tag:yaml.org,2002:str", "!")


def resolve(text: str) -> Value:
    """The value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return whole(text)
    if match := _OCTAL.fullmatch(text):
        return whole(match[1], 8)
    if match := _HEX.fullmatch(text):
        return whole(match[1], 16)
    if _FLOAT.fullmatch(text):
        return number(float(text))
    return text


def whole(digits: str, base: int = 10) -> int | float:
    """A whole number; one that is implausibly long is infinite."""
    return int(digits, base) if len(digits) <= MAX_DIGITS else float("inf")


def number(value: float) -> int | float:
    """The number, as an int if it has no fractional part."""
    return int(value) if value.is_integer() and abs(value) < 10**MAX_DIGITS else value
