"""How each parameter of a module is stored and read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardplan.core.layout import I, Layout, R, V
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ParameterProgram, StandIn
from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.core.tree import ModuleInfo, ParameterInfo, ancestors, full_name, parent

from . import STYLES, ParameterStyle, feature_dim
from .adapter_styles import adapter_dim, adapter_style
from .head_counts import copies_of, head_counts
from .packed_lengths import packed_parts
from .style_record import WHOLE
from .token_layouts import tokens_layout


def _parts(rule: Rule, size: int, plan: ResolvedPlan) -> tuple[int, ...]:
    """The lengths of a packed dimension's parts; parts that do not fit are a finding."""
    parts = packed_parts(rule, size, plan.tree.numbers)
    return parts if isinstance(parts, tuple) else (size,)


def parameter_style(assignment: Assignment, parameter: ParameterInfo) -> ParameterStyle:
    """How a rule stores a parameter of the layer itself, which it names directly or through its module."""
    style = STYLES[assignment.rule.style]
    return style.weight if assignment.is_parameter else style.parameter(parameter.short)


def split_dim(module: ModuleInfo, parameter: ParameterInfo, placement: ParameterStyle) -> int | None:
    """The dim (from 0) that is split; None for a whole copy, or if the parameter has no such dim."""
    if placement.shard is None or not parameter.shape:
        return None
    if placement.shard == "head":  # dims of length 1 in front of it are for broadcasting
        return next((at for at, length in enumerate(parameter.shape) if length > 1), None)
    dim = feature_dim(module.kind, parameter.short, placement.shard, len(parameter.shape))
    return dim if dim is not None and dim < len(parameter.shape) else None


def lower_parameters(plan: ResolvedPlan, module: ModuleInfo) -> tuple[ParameterProgram, ...]:
    """A program for every parameter that the module owns. One that no rule names is whole with a complete gradient; an
    adapter is stored like its layer."""
    found = tuple(_lower_parameter(plan, module, parameter) for parameter in module.parameters)
    if plan.axis is Axis.TP:
        return found
    # Whole, and read with partial gradients, which data parallelism sums.
    return tuple(replace(one, computed=R) if one.computed == I else one for one in found)


def _lower_parameter(plan: ResolvedPlan, module: ModuleInfo, parameter: ParameterInfo) -> ParameterProgram:
    own = plan.parameters.get(full_name(module.name, parameter.name))
    assignment = own or plan.modules.get(module.name)
    if assignment is None or (own is None and STYLES[assignment.rule.style].is_block_input):
        return ParameterProgram(parameter.name, I, _computed_without_rule(plan, module))
    style = STYLES[assignment.rule.style]
    if parameter.adapter is not None:
        return _lower_adapter(plan, module, parameter, adapter_style(style, parameter) or WHOLE, assignment.rule)
    placement = parameter_style(assignment, parameter)
    withheld = own is None and style.bias is not None and parameter.short == "bias"
    return _program(plan, module, parameter, placement, assignment.rule, withheld=withheld)


def _computed_without_rule(plan: ResolvedPlan, module: ModuleInfo) -> Layout:
    """The layout in which a whole copy is read. Inside of distributed experts its gradient is partial (R), as each rank
    runs its own experts on other tokens. If all tp ranks call them with the same tokens, the exchange sums it (I)."""
    experts = distributed_experts(plan, module.name)
    if experts is None:
        return I
    sliced = STYLES[plan.modules[experts].rule.style].exchanges and tokens_layout(plan, experts) == I
    return I if sliced else R


def distributed_experts(plan: ResolvedPlan, name: str) -> str | None:
    """The module around this one whose experts a rule distributes whole."""
    ruled = (above for above in ancestors(name) if above in plan.modules)
    return next((above for above in ruled if STYLES[plan.modules[above].rule.style].experts is not None), None)


def _lower_adapter(
    plan: ResolvedPlan, module: ModuleInfo, parameter: ParameterInfo, placement: ParameterStyle, rule: Rule
) -> ParameterProgram:
    if placement.shard is None:
        return ParameterProgram(parameter.name, I, Layout(placement.computed))
    return _split(plan, module, parameter, placement, rule, adapter_dim(parameter, placement.shard))


def _program(
    plan: ResolvedPlan,
    module: ModuleInfo,
    parameter: ParameterInfo,
    placement: ParameterStyle,
    rule: Rule,
    *,
    withheld: bool,
) -> ParameterProgram:
    dim = split_dim(module, parameter, placement)
    if dim is None:
        computed = _computed(plan, module, placement) if placement.shard is None else I
        # A Linear skips a bias of None; Conv1D's addmm needs one.
        stand_in: StandIn | None = ("zeros" if module.kind == "conv1d" else "none") if withheld else None
        return ParameterProgram(parameter.name, I, computed, withheld=stand_in)
    return _split(plan, module, parameter, placement, rule, dim)


def _computed(plan: ResolvedPlan, module: ModuleInfo, placement: ParameterStyle) -> Layout:
    """The layout in which a whole copy is read."""
    if not placement.as_input:
        return Layout(placement.computed)
    return I if tokens_layout(plan, module.name) == I else R


def _split(
    plan: ResolvedPlan, module: ModuleInfo, parameter: ParameterInfo, placement: ParameterStyle, rule: Rule, dim: int
) -> ParameterProgram:
    """A parameter that is stored in shards. With fewer key-value heads than ranks, several share each head."""
    size, ranks = parameter.shape[dim], plan.sizes.tp or 1
    parts = _parts(rule, size, plan) if placement.packed else ()
    if placement.shard == "expert":
        return ParameterProgram(parameter.name, *(replace(V(dim), axis=placement.axis),) * 2)
    if placement.computed != "V":
        return ParameterProgram(parameter.name, V(dim), Layout(placement.computed))
    lengths = parts or (size,)
    heads = heads_of(plan, module, placement, rule, lengths)
    few = placement.shard == "out" and any(count is not None and count < ranks for count in heads)
    copies = copies_of(heads, lengths, max(counts_of_heads(plan, parent(module.name)), default=0), ranks) if few else ()
    if not any(number > 1 for number in copies):
        return ParameterProgram(parameter.name, V(dim), V(dim), parts)
    if parts:
        return ParameterProgram(parameter.name, V(dim), V(dim), parts, copies)
    return ParameterProgram(parameter.name, V(dim), R if copies[0] == ranks else replace(V(dim), copies=copies[0]))


def heads_of(
    plan: ResolvedPlan, module: ModuleInfo, placement: ParameterStyle, rule: Rule, lengths: tuple[int, ...]
) -> tuple[int | None, ...]:
    """The number of heads in each separately split length of a module's parameter."""
    around = plan.tree.modules[parent(module.name)]
    return head_counts(placement, rule, around, plan.tree.numbers, lengths)


def counts_of_heads(plan: ResolvedPlan, around: str) -> tuple[int, ...]:
    """The numbers of heads of a module's split matrices; its queries have the most."""
    found: list[int] = []
    for name in plan.tree.children[around]:
        for assignment, module, parameter in ruled(plan, plan.tree.modules[name]):
            placement = parameter_style(assignment, parameter)
            dim = split_dim(module, parameter, placement)
            if dim is not None:
                size = parameter.shape[dim]
                lengths = _parts(assignment.rule, size, plan) if placement.packed else (size,)
                heads = heads_of(plan, module, placement, assignment.rule, lengths)
                found += [count for count in heads if count is not None]
    return tuple(found)


def ruled(plan: ResolvedPlan, module: ModuleInfo) -> Iterator[tuple[Assignment, ModuleInfo, ParameterInfo]]:
    """The parameters of the layer itself that a rule stores."""
    for parameter in module.parameters:
        own = plan.parameters.get(full_name(module.name, parameter.name))
        assignment = own or plan.modules.get(module.name)
        if assignment is None or parameter.adapter is not None:
            continue
        if own is not None or not STYLES[assignment.rule.style].is_block_input:
            yield assignment, module, parameter
