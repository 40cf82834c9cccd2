"""What watches the run of a planned model. Each guard stands in a file of its own (docs/decisions/0045)."""

from __future__ import annotations

from torch import nn

from shardplan.model.adapters import unwrapped
from shardplan.torchlib.hook_order import order_hooks

from .before_weights import refuse_before_weights
from .later_float8 import refuse_later_float8
from .plan_mesh import PlanMesh
from .same_inputs import compare_inputs
from .same_kinds import compare_kinds
from .same_weights import compare_weights
from .sampling import sample_alike


def guard(model: nn.Module, mesh: PlanMesh, *, compare: bool) -> None:
    """Attach the guards to a model that a plan was applied to.

    Args:
        compare: compare the inputs of tp ranks, the kinds of inputs of data-parallel ranks, and the weights of replicas.
    """
    if mesh.tp is not None and mesh.tp_size > 1:
        if compare:
            compare_inputs(model, mesh.tp)
        sample_alike(unwrapped(model), mesh.tp)
    if compare:
        compare_kinds(model, mesh)
        compare_weights(model, mesh.mesh)
    refuse_later_float8(model)
    refuse_before_weights(model)  # last, as its hook runs first: there is nothing to compare without weights
    order_hooks(model)
