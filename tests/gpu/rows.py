"""A part's results: a row is a line of its output, which is written to the file of results at once."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

MARK = "@row "


def emit(**row: Any) -> None:
    """One result. `ok` false makes the part a failed one; without `ok` it is a figure."""
    text = json.dumps({name: _plain(value) for name, value in row.items()})
    sys.stdout.write(f"\n{MARK}{text}\n")
    sys.stdout.flush()


def attempt(case: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row with what is measured, or with the error: the cases after it go on. Returns it."""
    start = time.monotonic()
    try:
        row = measure()
    except Exception as error:
        traceback.print_exc()
        row = {"ok": False, "error": _said(error)}
    emit(case=case, **row, seconds=round(time.monotonic() - start, 1))
    return row


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines)}"[:400]


def _plain(value: Any) -> Any:
    """Numbers that JSON does not have, and all objects, as words."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
