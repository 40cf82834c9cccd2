"""Plans as text -> `PlanFile` with the place of each element. Imports neither torch nor transformers."""

from typing import Any

from .foreign import from_hf_tp_plan
from .form import UNKNOWN_FIELD, VERSION, WRONG_VALUE
from .lint import CONTRADICTION, EMPTY_PART, NO_EFFECT, lint_plan
from .parents import CIRCLE, NO_PARENT, OUTSIDE
from .parse_findings import TOO_LARGE
from .parsing import Parsed, parse_plan, parse_text
from .plan_files import CANNOT_READ, builtin_plans
from .read_rules import NONE_WITHOUT_PARENT, UNKNOWN_STYLE, WRONG_EXPRESSION, WRONG_GLOB, WRONG_OPTION
from .syntax import DUPLICATE_KEY, SYNTAX

CODES = (
    CANNOT_READ,
    SYNTAX,
    DUPLICATE_KEY,
    UNKNOWN_FIELD,
    WRONG_VALUE,
    UNKNOWN_STYLE,
    WRONG_OPTION,
    NO_PARENT,
    CIRCLE,
    OUTSIDE,
    TOO_LARGE,
    WRONG_GLOB,
    WRONG_EXPRESSION,
    VERSION,
    NONE_WITHOUT_PARENT,
    CONTRADICTION,
    NO_EFFECT,
    EMPTY_PART,
)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of plans."""
    from .schema import json_schema as make

    return make()


__all__ = [
    "CODES",
    "Parsed",
    "builtin_plans",
    "from_hf_tp_plan",
    "json_schema",
    "lint_plan",
    "parse_plan",
    "parse_text",
]
