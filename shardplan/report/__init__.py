"""Reports and findings as text, JSON and SARIF. Imports neither torch nor transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .color import wants_color
from .text import report_text, text

if TYPE_CHECKING:
    from .json import json_text, to_json
    from .sarif import to_sarif

# Imported when needed: the records of the JSON form take longer than linting a plan.
LAZY = {"json_text": "json", "to_json": "json", "to_sarif": "sarif"}

__all__ = ["json_text", "report_text", "text", "to_json", "to_sarif", "wants_color"]


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
