"""The tensor-parallel plan that transformers has for a model."""

from __future__ import annotations

from torch import nn

from shardplan.core.diagnostics import Code

from .build_tree import base_prefix
from .model_findings import refuse

NO_HF_PLAN = Code("SP514")


def hf_tp_plan(model: nn.Module) -> tuple[dict[str, str], str]:
    """The model's own resolved plan, and the prefix that turns its keys into the names that rules see.

    Args:
        model: a transformers model on any device; its `tp_plan` joins the plans of its class, its
            configuration and its children.

    Returns:
        The plan (names with `*` for a layer's number -> style names), and `ModuleTree.base_prefix`.

    Raises:
        PlanError: SP514 where the model has none.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        raise refuse(
            NO_HF_PLAN,
            f"transformers has no tensor-parallel plan for {type(model).__name__}",
            help="name a built-in plan (`shardplan list` shows them) or a plan file",
        )
    return dict(plan), base_prefix(model)
