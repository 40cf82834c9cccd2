"""What a notebook shows of a result that a cell ends with: what the command line prints, in place of a dataclass on one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _report(value: Any) -> str:
    from .text import report_text

    return report_text(value, color=False)


def _proof(value: Any) -> str:
    from .proof_text import proof_text

    return proof_text(value, color=False)


def _estimate(value: Any) -> str:
    from .estimate_text import estimate_text

    return estimate_text(value, color=False)


def _sweep(value: Any) -> str:
    from .estimate_text import sweep_text

    return sweep_text(value, color=False)


def _diff(value: Any) -> str:
    from .diff_text import diff_text

    return diff_text(value, color=False)


def _lock_check(value: Any) -> str:
    from .lock_json import check_text

    return check_text(value, color=False)


# By name: nothing is imported until a cell ends with one.
SHOWN: Mapping[tuple[str, str], Callable[[Any], str]] = {
    ("shardplan.core.report", "Report"): _report,
    ("shardplan.core.report", "VerifyReport"): _proof,
    ("shardplan.core.estimates", "Estimate"): _estimate,
    ("shardplan.core.estimates", "Sweep"): _sweep,
    ("shardplan.core.plan_changes", "PlanDiff"): _diff,
    ("shardplan.core.plan_lock", "LockCheck"): _lock_check,
}


def show_results(shell: Any) -> None:
    """Lets an IPython shell print results as text.

    Args:
        shell: what `get_ipython()` returns.
    """
    formatter = shell.display_formatter.formatters["text/plain"]
    for (module, name), shown in SHOWN.items():
        formatter.for_type_by_name(module, name, _printing(shown))


def _printing(shown: Callable[[Any], str]) -> Callable[[Any, Any, bool], None]:
    return lambda value, printer, cycle: printer.text(shown(value))
