"""The display of a notebook cell's result: the command line's text instead of a dataclass on one line."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

# Names of results -> the functions that show them: nothing is imported until a cell ends with such a result.
SHOWN: Mapping[tuple[str, str], tuple[str, str]] = {
    ("shardplan.core.report", "Report"): ("text", "report_text"),
    ("shardplan.core.report", "NumericProof"): ("proof_text", "proof_text"),
    ("shardplan.core.estimates", "Estimate"): ("estimate_text", "estimate_text"),
    ("shardplan.core.plan_changes", "PlanDiff"): ("diff_text", "diff_text"),
    ("shardplan.core.plan_lock", "LockCheck"): ("lock_json", "check_text"),
}


def show_results(shell: Any) -> None:
    """Let an IPython shell print results as text.

    Args:
        shell: what `get_ipython()` returns.
    """
    formatter = shell.display_formatter.formatters["text/plain"]
    for (module, name), (file, function) in SHOWN.items():
        formatter.for_type_by_name(module, name, partial(_print, file, function))


def _print(file: str, function: str, value: Any, printer: Any, cycle: bool) -> None:
    shown = getattr(import_module(f".{file}", __package__), function)
    printer.text(shown(value, color=False))
