"""shardplan: a compiler for sharding plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import applied, apply_plan, compile_plan, coverage, init_plan, load_plan, validate, verify
    from .apply import without_sequence_parallel
    from .core.diagnostics import PlanError
    from .core.plan import Plan
    from .core.report import Report
    from .training import causal_lm_loss, vocabulary_parallel_nll
    from .weights import (
        Loaded,
        Progress,
        load_checkpoint,
        load_training_state,
        materialize,
        save_checkpoint,
        save_training_state,
    )

# What the package offers, and where it is: imported when it is first asked for, so that `import shardplan`
# and linting a plan import neither torch nor pydantic.
_EXPORTS = {
    "load_plan": "shardplan.api",
    "init_plan": "shardplan.api",
    "coverage": "shardplan.api",
    "validate": "shardplan.api",
    "compile_plan": "shardplan.api",
    "apply_plan": "shardplan.api",
    "verify": "shardplan.api",
    "applied": "shardplan.api",
    "without_sequence_parallel": "shardplan.apply",
    "materialize": "shardplan.weights",
    "load_checkpoint": "shardplan.weights",
    "save_checkpoint": "shardplan.weights",
    "save_training_state": "shardplan.weights",
    "load_training_state": "shardplan.weights",
    "Loaded": "shardplan.weights",
    "Progress": "shardplan.weights",
    "causal_lm_loss": "shardplan.training",
    "vocabulary_parallel_nll": "shardplan.training",
    "PlanError": "shardplan.core.diagnostics",
    "Plan": "shardplan.core.plan",
    "Report": "shardplan.core.report",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
