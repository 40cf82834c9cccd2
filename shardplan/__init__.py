"""shardplan: a compiler for sharding plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import (
        applied,
        apply_plan,
        compile_plan,
        convert_plan,
        coverage,
        estimate,
        init_plan,
        load_plan,
        sweep,
        validate,
        verify,
    )
    from .apply import build_mesh, without_sequence_parallel
    from .apply.micro_batches import micro_batches
    from .compat import DDPConfig, FSDP2Config, MegatronFSDPConfig
    from .compiler.inputs import Model
    from .core.diagnostics import PlanError
    from .core.estimate import TrainingStep
    from .core.plan import Plan
    from .core.report import Report
    from .training import (
        causal_lm_loss,
        clip_grad_by_total_norm_,
        clip_grad_norm_,
        context_parallel,
        entropy,
        get_grad_norm,
        log_probabilities,
        pad_to_multiple,
        to_local_if_dtensor,
        top_k,
        unshard,
        vocabulary_parallel_nll,
    )
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
    "load_plan": "shardplan.api.plans",
    "init_plan": "shardplan.api.plans",
    "convert_plan": "shardplan.api.plans",
    "coverage": "shardplan.api.check",
    "validate": "shardplan.api.check",
    "compile_plan": "shardplan.api.apply",
    "apply_plan": "shardplan.api.apply",
    "verify": "shardplan.api.check",
    "estimate": "shardplan.api.cost",
    "sweep": "shardplan.api.cost",
    "applied": "shardplan.api.apply",
    "build_mesh": "shardplan.apply",
    "without_sequence_parallel": "shardplan.apply",
    "micro_batches": "shardplan.apply",
    "materialize": "shardplan.weights",
    "load_checkpoint": "shardplan.weights",
    "save_checkpoint": "shardplan.weights",
    "save_training_state": "shardplan.weights",
    "load_training_state": "shardplan.weights",
    "Loaded": "shardplan.weights",
    "Progress": "shardplan.weights",
    "causal_lm_loss": "shardplan.training",
    "pad_to_multiple": "shardplan.training",
    "clip_grad_by_total_norm_": "shardplan.training",
    "clip_grad_norm_": "shardplan.training",
    "entropy": "shardplan.training",
    "get_grad_norm": "shardplan.training",
    "log_probabilities": "shardplan.training",
    "to_local_if_dtensor": "shardplan.training",
    "top_k": "shardplan.training",
    "unshard": "shardplan.training",
    "context_parallel": "shardplan.training",
    "vocabulary_parallel_nll": "shardplan.training",
    "FSDP2Config": "shardplan.compat",
    "MegatronFSDPConfig": "shardplan.compat",
    "DDPConfig": "shardplan.compat",
    "Model": "shardplan.compiler.inputs",
    "TrainingStep": "shardplan.core.estimate",
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
