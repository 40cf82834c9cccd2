"""When to use colour, and which colours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TextIO

Role = Literal["error", "warning", "note", "help", "gutter", "strong", "good"]

_CODES: dict[Role, str] = {
    "error": "1;31",
    "warning": "1;33",
    "note": "1;34",
    "help": "1;36",
    "gutter": "1;34",
    "strong": "1",
    "good": "1;32",
}


class Paint:
    """Wraps text in the ANSI escapes of a role; leaves it unchanged where colour is off."""

    def __init__(self, on: bool):
        self.on = on

    def __call__(self, role: Role, text: str) -> str:
        return f"\x1b[{_CODES[role]}m{text}\x1b[0m" if self.on and text else text


def wants_color(stream: TextIO, env: Mapping[str, str] = os.environ) -> bool:
    """Whether output to the stream is coloured: NO_COLOR (https://no-color.org) decides first, then FORCE_COLOR,
    then whether the stream is a terminal with colours."""
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR", "0") not in {"", "0"}:
        return True
    return stream.isatty() and env.get("TERM") != "dumb"
