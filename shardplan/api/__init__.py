"""The public functions, one file for each task.

| file | functions |
|---|---|
| plans | load_plan, init_plan |
| check | validate, verify, coverage |
| apply | compile_plan, apply_plan |
| cost | estimate |
| fitting | fit |
| comparing | diff_plans |
| exporting | export_plan |
| fixing | fix_plan |
| locking | lock_plan, check_lock |
| reporting | plan_report |
"""

from .apply import apply_plan, compile_plan
from .check import coverage, validate, verify
from .comparing import diff_plans
from .cost import estimate
from .exporting import ExportedPlan, export_plan
from .fitting import fit
from .fixing import FixedPlan, fix_plan
from .locking import check_lock, lock_plan
from .plans import init_plan, load_plan
from .reporting import plan_report

__all__ = [
    "ExportedPlan",
    "FixedPlan",
    "apply_plan",
    "check_lock",
    "compile_plan",
    "coverage",
    "diff_plans",
    "estimate",
    "export_plan",
    "fit",
    "fix_plan",
    "init_plan",
    "load_plan",
    "lock_plan",
    "plan_report",
    "validate",
    "verify",
]
