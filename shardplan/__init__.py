"""shardplan: a compiler for sharding plans."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .core.version import __version__

if TYPE_CHECKING:  # each name under its own name again: so type checkers know that it is offered
    from .api import (
        ExportedPlan as ExportedPlan,
        apply_plan as apply_plan,
        check_lock as check_lock,
        compile_plan as compile_plan,
        coverage as coverage,
        diff_plans as diff_plans,
        estimate as estimate,
        export_plan as export_plan,
        fit as fit,
        fix_plan as fix_plan,
        init_plan as init_plan,
        load_plan as load_plan,
        lock_plan as lock_plan,
        plan_report as plan_report,
        validate as validate,
        verify as verify,
    )
    from .compiler.user_inputs import Model as Model
    from .core.diagnostics import PlanError as PlanError
    from .core.estimates import EngineRanks as EngineRanks, TrainingStep as TrainingStep
    from .core.plan import Plan as Plan
    from .core.plan_changes import PlanDiff as PlanDiff
    from .core.plan_lock import LockedQuestion as LockedQuestion
    from .core.report import Report as Report
    from .runtime.apply import (
        applied as applied,
        build_mesh as build_mesh,
        without_sequence_parallel as without_sequence_parallel,
    )
    from .runtime.pipeline import Pipeline as Pipeline, PipelineOptions as PipelineOptions
    from .runtime.training import (
        causal_lm_loss as causal_lm_loss,
        clip_grad_norm_ as clip_grad_norm_,
        context_parallel as context_parallel,
        count_expert_tokens as count_expert_tokens,
        micro_batches as micro_batches,
        pad_to_multiple as pad_to_multiple,
        unshard as unshard,
        update_expert_bias as update_expert_bias,
        watch_ranks as watch_ranks,
    )
    from .weights import (
        Loaded as Loaded,
        Progress as Progress,
        Refit as Refit,
        full_parameters as full_parameters,
        load_checkpoint as load_checkpoint,
        load_training_state as load_training_state,
        materialize as materialize,
        refit as refit,
        save_checkpoint as save_checkpoint,
        save_training_state as save_training_state,
    )


# What the package offers, and where it is: imported when it is first asked for, so that `import shardplan`
# and linting a plan import neither torch nor pydantic.
_EXPORTS = {
    "load_plan": "shardplan.api.plans",
    "init_plan": "shardplan.api.plans",
    "coverage": "shardplan.api.check",
    "diff_plans": "shardplan.api.comparing",
    "fix_plan": "shardplan.api.fixing",
    "lock_plan": "shardplan.api.locking",
    "check_lock": "shardplan.api.locking",
    "plan_report": "shardplan.api.reporting",
    "validate": "shardplan.api.check",
    "compile_plan": "shardplan.api.apply",
    "apply_plan": "shardplan.api.apply",
    "verify": "shardplan.api.check",
    "estimate": "shardplan.api.cost",
    "export_plan": "shardplan.api.exporting",
    "ExportedPlan": "shardplan.api.exporting",
    "fit": "shardplan.api.fitting",
    "applied": "shardplan.runtime.apply",
    "build_mesh": "shardplan.runtime.apply",
    "without_sequence_parallel": "shardplan.runtime.apply",
    "micro_batches": "shardplan.runtime.training",
    "Pipeline": "shardplan.runtime.pipeline",
    "PipelineOptions": "shardplan.runtime.pipeline",
    "materialize": "shardplan.weights",
    "load_checkpoint": "shardplan.weights",
    "save_checkpoint": "shardplan.weights",
    "full_parameters": "shardplan.weights",
    "refit": "shardplan.weights",
    "Refit": "shardplan.weights",
    "save_training_state": "shardplan.weights",
    "load_training_state": "shardplan.weights",
    "Loaded": "shardplan.weights",
    "Progress": "shardplan.weights",
    "causal_lm_loss": "shardplan.runtime.training",
    "pad_to_multiple": "shardplan.runtime.training",
    "clip_grad_norm_": "shardplan.runtime.training",
    "unshard": "shardplan.runtime.training",
    "context_parallel": "shardplan.runtime.training",
    "count_expert_tokens": "shardplan.runtime.training",
    "update_expert_bias": "shardplan.runtime.training",
    "watch_ranks": "shardplan.runtime.training",
    "Model": "shardplan.compiler.user_inputs",
    "TrainingStep": "shardplan.core.estimates",
    "EngineRanks": "shardplan.core.estimates",
    "PlanError": "shardplan.core.diagnostics",
    "Plan": "shardplan.core.plan",
    "PlanDiff": "shardplan.core.plan_changes",
    "LockedQuestion": "shardplan.core.plan_lock",
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


def _shell() -> Any:
    """The IPython shell that this process is, if it is one (a notebook)."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


if _shell() is not None:
    from .report.notebook import show_results

    show_results(_shell())
