"""Buffers that have a place for each head or feature, of which a rank's forward reads its own."""

from __future__ import annotations

from dataclasses import replace

from shardplan.core.layout import V
from shardplan.core.module_program import ParameterProgram
from shardplan.core.plan import ResolvedPlan, Rule, SplitBuffer
from shardplan.core.tree import ModuleInfo, full_name

from .stored_parameters import lower_parameters
from .style_record import feature_dim


def own_buffers(plan: ResolvedPlan, module: ModuleInfo, rule: Rule) -> tuple[ParameterProgram, ...]:
    """Those of a module that a rule splits; what does not fit is a finding (compiler/check/declared_heads.py)."""
    found = (own_buffer(plan, module, one) for one in rule.split_buffers)
    return tuple(one for one in found if isinstance(one, ParameterProgram))


def own_buffer(plan: ResolvedPlan, module: ModuleInfo, one: SplitBuffer) -> ParameterProgram | str | None:
    """How a buffer is read: as a parameter that is stored in these shards would be.

    Returns:
        None where every rank reads all of it (the features of one head that all ranks share), and why it does not fit.
    """
    shape, ranks = module.buffers.get(one.buffer), plan.sizes.tp or 1
    if shape is None:
        return f"{module.class_name} has no buffer {one.buffer}"
    if one.dim >= len(shape):
        return f"{one.buffer} is {list(shape)}, without a dim {one.dim}"
    size = shape[one.dim]
    if one.like is None:
        even = ParameterProgram(one.buffer, V(one.dim), V(one.dim))
        return (
            f"{one.buffer} has {size} places in dim {one.dim}, which tp={ranks} does not divide"
            if size % ranks
            else even
        )
    other = plan.tree.modules.get(full_name(module.name, one.like))
    info = other.parameter("weight") if other is not None else None
    if other is None or info is None:
        return f"{module.class_name} has no module {one.like} with a weight"
    dim = feature_dim(other.kind, "weight", "out", len(info.shape))
    weight = next(p for p in lower_parameters(plan, other) if p.name == info.name)
    if dim is None or weight.dim != dim:
        return f"the output features of {one.like} are not split"
    if info.shape[dim] != size:
        return f"{one.like} has {info.shape[dim]} output features, but {one.buffer} is {list(shape)}"
    if weight.computed.kind != "V":
        return None
    return ParameterProgram(one.buffer, V(one.dim), replace(weight.computed, dim=one.dim), weight.parts, weight.copies)
