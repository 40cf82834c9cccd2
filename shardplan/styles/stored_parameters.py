"""How each parameter of a module is stored and read."""

from __future__ import annotations

from shardplan.core.expressions import evaluate, parse_expression
from shardplan.core.layout import I, Layout, V
from shardplan.core.module_program import ParameterProgram, StandIn
from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.core.tree import ModuleInfo, ParameterInfo, full_name

from . import STYLES, ParameterStyle, feature_dim
from .adapter_styles import adapter_dim, adapter_style
from .style_record import WHOLE


def packed_parts(rule: Rule, size: int, plan: ResolvedPlan) -> tuple[int, ...]:
    """The sizes of a packed dimension's parts: as the rule declares, by default two equal ones."""
    packed = rule.packed if rule.packed is not None else 2
    if isinstance(packed, int):
        return (size // packed,) * packed
    return tuple(evaluate(parse_expression(part), plan.tree.numbers) for part in packed)


def parameter_style(assignment: Assignment, parameter: ParameterInfo) -> ParameterStyle:
    """How a rule stores a parameter of the layer itself: the one it names, or one of the module it names."""
    style = STYLES[assignment.rule.style]
    return style.weight if assignment.is_parameter else style.parameter(parameter.short)


def split_dim(module: ModuleInfo, parameter: ParameterInfo, placement: ParameterStyle) -> int | None:
    """The dim (from 0) that is split; None for a whole copy, and where the parameter has no such dim."""
    if placement.shard is None or not parameter.shape:
        return None
    dim = feature_dim(module.kind, parameter.short, placement.shard, len(parameter.shape))
    return dim if dim is not None and dim < len(parameter.shape) else None


def lower_parameters(plan: ResolvedPlan, module: ModuleInfo) -> tuple[ParameterProgram, ...]:
    """A program for every parameter that the module owns; what no rule names is whole with a complete gradient, and an
    adapter is stored as its layer is."""
    return tuple(_lower_parameter(plan, module, parameter) for parameter in module.parameters)


def _lower_parameter(plan: ResolvedPlan, module: ModuleInfo, parameter: ParameterInfo) -> ParameterProgram:
    own = plan.parameters.get(full_name(module.name, parameter.name))
    assignment = own or plan.modules.get(module.name)
    if assignment is None or (own is None and STYLES[assignment.rule.style].is_block_input):
        return ParameterProgram(parameter.name, I, I)
    style = STYLES[assignment.rule.style]
    if parameter.adapter is not None:
        return _lower_adapter(plan, parameter, adapter_style(style, parameter) or WHOLE, assignment.rule)
    placement = parameter_style(assignment, parameter)
    withheld = own is None and style.bias is not None and parameter.short == "bias"
    return _program(plan, module, parameter, placement, assignment.rule, withheld=withheld)


def _lower_adapter(
    plan: ResolvedPlan, parameter: ParameterInfo, placement: ParameterStyle, rule: Rule
) -> ParameterProgram:
    if placement.shard is None:
        return ParameterProgram(parameter.name, I, Layout(placement.computed))
    dim = adapter_dim(parameter, placement.shard)
    parts = packed_parts(rule, parameter.shape[dim], plan) if placement.packed else ()
    return ParameterProgram(parameter.name, V(dim), V(dim), parts)


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
        computed = Layout(placement.computed) if placement.shard is None else I
        # A Linear skips a bias that is None; Conv1D's addmm needs one.
        stand_in: StandIn | None = ("zeros" if module.kind == "conv1d" else "none") if withheld else None
        return ParameterProgram(parameter.name, I, computed, withheld=stand_in)
    parts = packed_parts(rule, parameter.shape[dim], plan) if placement.packed else ()
    computed = V(dim) if placement.computed == "V" else Layout(placement.computed)
    return ParameterProgram(parameter.name, V(dim), computed, parts)
