"""Arguments and buffers that every rank has whole; a module's forward reads the rank's share of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.core.expressions import count_of
from shardplan.core.layout import V
from shardplan.core.module_program import ArgumentSlice, ParameterProgram
from shardplan.core.plan import ResolvedPlan, Rule
from shardplan.core.shares import Share
from shardplan.core.tree import ModuleInfo, full_name

from .stored_parameters import lower_parameters
from .style_record import feature_dim

TensorShare = ArgumentSlice | ParameterProgram


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why what a rule counts does not fit a module.

    Args:
        reason: in words.
        uneven: it is the tp size that does not divide it.
    """

    reason: str
    uneven: bool = False


def tensor_shares(plan: ResolvedPlan, module: ModuleInfo, rule: Rule) -> Iterator[TensorShare]:
    """The arguments and buffers of a module that a rule splits; misfits are findings
    (compiler/check/declared_heads.py)."""
    for one in rule.shares:
        found = tensor_share(plan, module, one) if one.dim is not None else None
        if isinstance(found, TensorShare):
            yield found


def tensor_share(plan: ResolvedPlan, module: ModuleInfo, one: Share) -> TensorShare | Misfit | None:
    """How an argument or a buffer is read. A buffer is read like a parameter that is stored in these shards.

    Args:
        one: a share with a dim.

    Returns:
        None if every rank reads all of a buffer (the features of one head that all ranks share); or why it does not fit.
    """
    known, buffer = module.arguments, one.name in module.buffers
    if buffer and known is not None and one.name in known:
        return Misfit(f"{one.name} is a buffer of {module.class_name} and an argument of its forward")
    if one.like is not None or (buffer and one.heads is None):
        return _buffer(plan, module, one)
    if known is not None and one.name not in known:
        what = "argument" if one.heads is not None else "buffer and no argument"
        return Misfit(f"{module.class_name} has no {what} {one.name}")
    return _argument(plan, one)


def _argument(plan: ResolvedPlan, one: Share) -> ArgumentSlice | Misfit:
    ranks = plan.sizes.tp or 1
    count = None if one.heads is None else count_of(one.heads, plan.tree.numbers)
    if isinstance(count, str):
        return Misfit(count)
    if count is not None and count % ranks:
        return Misfit(f"{one.name} has {count} heads, which tp={ranks} does not divide", uneven=True)
    assert one.dim is not None
    return ArgumentSlice(one.name, one.dim, count)


def _buffer(plan: ResolvedPlan, module: ModuleInfo, one: Share) -> ParameterProgram | Misfit | None:
    shape, ranks, at = module.buffers.get(one.name), plan.sizes.tp or 1, one.dim
    assert at is not None
    if shape is None:
        return Misfit(f"{module.class_name} has no buffer {one.name}")
    if at >= len(shape):
        return Misfit(f"{one.name} is {list(shape)}, without a dim {at}")
    size = shape[at]
    if one.like is None:
        if size % ranks:
            return Misfit(f"{one.name} has {size} places in dim {at}, which tp={ranks} does not divide", uneven=True)
        return ParameterProgram(one.name, V(at), V(at))
    other = plan.tree.modules.get(full_name(module.name, one.like))
    info = other.parameter("weight") if other is not None else None
    if other is None or info is None:
        return Misfit(f"{module.class_name} has no module {one.like} with a weight")
    dim = feature_dim(other.kind, "weight", "out", len(info.shape))
    weight = next(p for p in lower_parameters(plan, other) if p.name == info.name)
    if dim is None or weight.dim != dim:
        return Misfit(f"the output features of {one.like} are not split")
    if info.shape[dim] != size:
        return Misfit(f"{one.like} has {info.shape[dim]} output features, but {one.name} is {list(shape)}")
    if weight.computed.kind != "V":
        return None
    return ParameterProgram(one.name, V(at), replace(weight.computed, dim=at), weight.parts, weight.copies)
