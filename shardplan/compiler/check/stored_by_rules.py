"""How each parameter of a bound plan is stored: by which rule, split or whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.core.by_key import by_key
from shardplan.core.mesh import Axis
from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.core.tree import ModuleInfo, ParameterInfo, full_name, is_count, parent
from shardplan.styles import STYLES, ParameterStyle, Style
from shardplan.styles.head_counts import HEAD_SIZES
from shardplan.styles.stored_parameters import parameter_style, split_dim


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """Parameters of one rule and one shape, in repeated layers; they have one placement on the tp axis.

    Args:
        names: their full names.
        assigned: what the rule names: the parameters themselves or their modules.
        module, around: the owner of the first one, and the module that holds that owner.
        parameter: the first one's short name, shape and dtype.
        assignment: the first one's.
        style: the rule's style.
        how: how the style stores and reads this parameter.
        dim: the dim (from 0) that is split, None for a whole copy.
    """

    names: tuple[str, ...]
    assigned: tuple[str, ...]
    module: ModuleInfo
    around: ModuleInfo
    parameter: ParameterInfo
    assignment: Assignment
    style: Style
    placement: ParameterStyle
    dim: int | None

    @property
    def rule(self) -> Rule:
        return self.assignment.rule

    @property
    def size(self) -> int:
        """The length of the split dim."""
        assert self.dim is not None
        return self.parameter.shape[self.dim]


def is_packed(module: ModuleInfo) -> bool:
    """Whether the weight of a linear module lacks one element for each pair of features, as quantised ones do."""
    weight, into, out = (
        module.parameter("weight"),
        module.numbers.get("in_features"),
        module.numbers.get("out_features"),
    )
    known = module.kind == "linear" and weight is not None and is_count(into) and is_count(out)
    return known and weight.numel != into * out  # type: ignore[operator, union-attr]  # all are known


@dataclass(frozen=True)
class StorageFacts:
    """A bound plan and how it stores its parameters.

    Args:
        resolved: the bound plan.
    """

    resolved: ResolvedPlan

    def style(self, assignment: Assignment) -> Style:
        return STYLES[assignment.rule.style]

    @cached_property
    def misfits(self) -> Mapping[str, Assignment]:
        """The assignments whose style does not fit what they name; reported by `compiler/check/kinds.py`."""
        return {name: a for name, a in self.resolved.assignments.items() if not self._fits(a)}

    @cached_property
    def packed(self) -> Mapping[str, Assignment]:
        """The misfits with a weight in packed form; reported by `compiler/check/packed_weights.py`."""
        modules = self.resolved.tree.modules
        return {name: a for name, a in self.misfits.items() if not a.is_parameter and is_packed(modules[name])}

    def _fits(self, assignment: Assignment) -> bool:
        style = self.style(assignment)
        if assignment.is_parameter:
            module, parameter = self.resolved.tree.parameters[assignment.name]
            whole = style.weight.shard is None
            return style.on_parameters and (whole or split_dim(module, parameter, style.weight) is not None)
        module = self.resolved.tree.modules[assignment.name]
        if style.kinds is not None and module.kind not in style.kinds:
            return False
        if style.weight.shard is not None and is_packed(module):
            return False
        return style.weight.shard is None or style.experts is not None or module.parameter("weight") is not None

    @cached_property
    def groups(self) -> tuple[StoredParameter, ...]:
        """Every parameter that a fitting rule claims, itself or through its module, grouped by placement; groups are in
        the tree's order of their first parameter."""

        def likeness(module: ModuleInfo, parameter: ParameterInfo, assignment: Assignment) -> tuple[object, ...]:
            around = self._around(module)
            return (
                id(assignment.rule), assignment.is_parameter, module.kind, module.class_name, parameter.name,
                parameter.shape, around.class_name, *(around.numbers.get(n) for n in HEAD_SIZES),
            )  # fmt: skip

        return tuple(map(self._group, by_key((likeness(*one[1:]), one) for one in self._claims()).values()))

    def _claims(self) -> Iterator[tuple[str, ModuleInfo, ParameterInfo, Assignment]]:
        tree, misfits = self.resolved.tree, self.misfits
        own = {n: a for n, a in self.resolved.parameters.items() if n not in misfits}
        owners = {tree.owner(name) for name in own}
        for module in tree.modules.values():
            above = self.resolved.modules.get(module.name)
            if above is not None and (module.name in misfits or self.style(above).is_block_input):
                above = None
            if above is None and module.name not in owners:
                continue
            for parameter in module.parameters:
                if parameter.adapter is not None:  # stored like its layer: compiler/check/adapter_splits.py
                    continue
                name = full_name(module.name, parameter.name)
                assignment = own.get(name, above)
                if assignment is not None:
                    yield name, module, parameter, assignment

    def _around(self, module: ModuleInfo) -> ModuleInfo:
        return self.resolved.tree.modules[parent(module.name)]

    def _group(self, members: list[tuple[str, ModuleInfo, ParameterInfo, Assignment]]) -> StoredParameter:
        names, modules, parameters, assignments = zip(*members, strict=True)
        module, parameter, assignment = modules[0], parameters[0], assignments[0]
        style = self.style(assignment)
        placement = parameter_style(assignment, parameter)
        return StoredParameter(
            names=names,
            assigned=tuple(a.name for a in assignments),
            module=module,
            around=self._around(module),
            parameter=parameter,
            assignment=assignment,
            style=style,
            placement=placement,
            dim=split_dim(module, parameter, placement),
        )

    @cached_property
    def stored(self) -> Mapping[str, StoredParameter]:
        """How each parameter that a fitting rule claims is stored."""
        return {name: group for group in self.groups for name in group.names}

    @cached_property
    def splits(self) -> tuple[StoredParameter, ...]:
        """The parameters that are split over tp."""
        return tuple(group for group in self.groups if group.dim is not None and group.placement.axis is Axis.TP)

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        """The numbers of rows of the vocabularies that a plan may split: those looked up by id, or the config's."""
        looked_up = {stored.size for stored in self.splits if stored.style.splits_rows}
        configured = self.resolved.tree.numbers.get("vocab_size")
        return frozenset(looked_up | ({configured} if is_count(configured) else set()))
