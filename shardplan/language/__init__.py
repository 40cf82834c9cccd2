"""Plans as text -> `PlanFile` with the place of each element. Imports neither torch nor transformers."""

from typing import Any

from .any_file import read_data
from .foreign import from_hf_tp_plan
from .globs import GlobError, parse_glob
from .lint import lint_plan
from .parsing import Parsed, parse_plan, parse_text
from .plan_files import builtin_plans


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of plans."""
    from .schema import json_schema as make

    return make()


__all__ = [
    "GlobError",
    "Parsed",
    "builtin_plans",
    "from_hf_tp_plan",
    "json_schema",
    "lint_plan",
    "parse_glob",
    "parse_plan",
    "parse_text",
    "read_data",
]
