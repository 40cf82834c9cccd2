"""The first phase: tensor and sequence parallelism, and the experts of each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.backends import mha
from torch.distributed.tensor.parallel import parallelize_module

from shardplan.compiler.lower.program import Program
from shardplan.runtime.parallel.expert_turns import watch_experts
from shardplan.runtime.parallel.forward import around_of, wrap_forward
from shardplan.runtime.parallel.leave_weights import leave_weights
from shardplan.runtime.parallel.make_styles import make_styles
from shardplan.runtime.parallel.own_experts import OwnExperts
from shardplan.runtime.parallel.regime import Shared

from .plan_mesh import PlanMesh


def shard(
    model: nn.Module, mesh: PlanMesh, program: Program, *, src_data_rank: int | None, ready: Callable[[], None]
) -> Shared:
    """Shard the model's parameters over the mesh's tp and ep axes, and register the moves, also those over cp. Without tp ranks, only
    modules of experts and those with moves over cp are touched.

    Args:
        ready: called before a parameter's values are sent; raises where another rank failed.
    """
    ep = mesh.ep if program.experts else None
    share = mesh.sizes.expert_share if program.experts else 1.0
    cp = mesh.cp if program.resolved.context_parallel else None
    styles, shared = make_styles(program.resolved, program.by_name, ready, ep, share, cp)
    if mesh.tp_size == 1 and cp is None:
        styles = {name: styles[name] for name in program.experts}
    tp = mesh.tp_or_one
    for name in sorted(
        styles, key=lambda name: not name
    ):  # the root last; given all names, torch searches for each by patterns
        parallelize_module(model.get_submodule(name), tp, styles[name], src_data_rank=src_data_rank)
    leave_weights(model, shared, program.resolved.compile_modules)
    if ep is not None:
        watch_experts(model, partial(around_of, kind=OwnExperts))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and mesh.tp_size > 1:
            wrap_forward(module, without_fast_path)
    return shared


def without_fast_path(forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """Wraps the forward of nn.TransformerEncoder. In evaluation without gradients it would make one nested tensor of padded
    sequences, which cannot be sliced or gathered. Its layers need no wrapper: where they see hooks, they run module by module."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        return forward(*args, **kwargs)
    finally:
        mha.set_fastpath_enabled(before)
