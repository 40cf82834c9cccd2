"""Reports and findings as text, JSON and SARIF. Imports neither torch nor transformers."""

from .color import wants_color
from .json import json_text, to_json
from .sarif import to_sarif
from .text import report_text, text

__all__ = ["json_text", "report_text", "text", "to_json", "to_sarif", "wants_color"]
