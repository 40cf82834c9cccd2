"""What several checks read: how each parameter is held, and what tp has to divide. Computed once per bound plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.core.plan import Assignment, ResolvedPlan, Rule
from shardplan.core.tree import ModuleInfo, ParameterInfo, ancestors, parent
from shardplan.styles import STYLES, ParameterStyle, Style, feature_dim
from shardplan.styles.record import WHOLE

from .requirements import Requirement, allowed_sizes, requirements


@dataclass(frozen=True, slots=True)
class Held:
    """How one parameter is held on the tp axis.

    Args:
        name: its full name.
        module: its owner.
        parameter: its shape and dtype.
        assignment: the rule that says so: of the parameter itself or of its module.
        style: the rule's style.
        how: what the style does with this parameter.
        dim: the dim (from 0) that is split, None for a whole copy.
    """

    name: str
    module: ModuleInfo
    parameter: ParameterInfo
    assignment: Assignment
    style: Style
    how: ParameterStyle
    dim: int | None

    @property
    def rule(self) -> Rule:
        return self.assignment.rule

    @property
    def size(self) -> int:
        """The length of the split dim."""
        assert self.dim is not None
        return self.parameter.shape[self.dim]


@dataclass(frozen=True)
class Facts:
    """A bound plan and what the checks derive from it.

    Args:
        resolved: the bound plan.
        seq_len: the sequence length that will be trained with, in tokens, if it is known.
    """

    resolved: ResolvedPlan
    seq_len: int | None = None

    def style(self, assignment: Assignment) -> Style:
        return STYLES[assignment.rule.style]

    def fits(self, assignment: Assignment) -> bool:
        """Whether the style can work on what the rule names; `check/kinds.py` reports where it cannot."""
        style = self.style(assignment)
        if assignment.is_parameter:
            module, parameter = self.resolved.tree.parameters[assignment.name]
            shard = style.weight.shard
            placed = shard is None or feature_dim(module.kind, parameter.name, shard, len(parameter.shape)) is not None
            return style.on_parameters and placed
        module = self.resolved.tree.modules[assignment.name]
        if style.kinds is not None and module.kind not in style.kinds:
            return False
        return not style.shards_parameters or module.parameter("weight") is not None

    @cached_property
    def held(self) -> Mapping[str, Held]:
        """Every parameter that a fitting rule claims, itself or through its module, in the tree's order."""
        modules = {n: a for n, a in self.resolved.modules.items() if not self.style(a).is_door and self.fits(a)}
        parameters = {n: a for n, a in self.resolved.parameters.items() if self.fits(a)}
        owners = modules.keys() | {parent(name) for name in parameters}
        result = {}
        for module in self.resolved.tree.modules.values():
            if module.name not in owners:
                continue
            for parameter in module.parameters:
                name = f"{module.name}.{parameter.name}" if module.name else parameter.name
                assignment = parameters.get(name) or modules.get(module.name)
                if assignment is not None:
                    result[name] = self._hold(name, module, parameter, assignment)
        return result

    def _hold(self, name: str, module: ModuleInfo, parameter: ParameterInfo, assignment: Assignment) -> Held:
        style = self.style(assignment)
        how = style.weight if assignment.is_parameter else style.parameter(parameter.name)
        dim = feature_dim(module.kind, parameter.name, how.shard, len(parameter.shape)) if how.shard else None
        return Held(name, module, parameter, assignment, style, how, dim)

    @cached_property
    def splits(self) -> tuple[Held, ...]:
        """The parameters that are split over tp."""
        return tuple(held for held in self.held.values() if held.dim is not None)

    @cached_property
    def vocabularies(self) -> frozenset[int]:
        """The numbers of rows of the vocabularies that a plan may split: looked up by id, or the config's."""
        looked_up = {held.size for held in self.splits if held.style.vocabulary}
        named = self.resolved.tree.numbers.get("vocab_size")
        return frozenset(looked_up | ({named} if isinstance(named, int) else set()))

    @cached_property
    def requirements(self) -> tuple[Requirement, ...]:
        """Every count that tp has to divide."""
        return tuple(requirements(self))

    @cached_property
    def allowed(self) -> tuple[int, ...]:
        """The tp sizes that the model allows with this plan, ascending, 1 included."""
        return allowed_sizes(self)

    @cached_property
    def tp(self) -> int | None:
        """The tp size to check: the one that was asked for, else the smallest allowed one above 1, if there is any."""
        if self.resolved.sizes.tp is not None:
            return self.resolved.sizes.tp
        return next((size for size in self.allowed if size > 1), None)

    @cached_property
    def _units(self) -> frozenset[str]:
        return frozenset(self.resolved.dp_units)

    def unit_of(self, module: str) -> str:
        """The innermost FSDP unit that holds a module; "" is the root's."""
        return next((name for name in (module, *ancestors(module)) if name in self._units), "")

    def claimed(self, module: str) -> bool:
        """Whether a rule names the module, one of its parameters, or, as a whole copy, a module around it."""
        return module in self._claimed or self.whole_around(module)

    def whole_around(self, module: str) -> bool:
        """Whether a rule keeps a module around this one whole."""
        around = (self.resolved.modules.get(name) for name in ancestors(module))
        return any(assignment is not None and self._keeps_whole(assignment) for assignment in around)

    def _keeps_whole(self, assignment: Assignment) -> bool:
        style = self.style(assignment)
        return style.owns_parameters and style.weight == WHOLE and not style.takes and style.tail is None

    @cached_property
    def _claimed(self) -> frozenset[str]:
        doors = (n for n, a in self.resolved.modules.items() if not self.style(a).is_door)
        return frozenset(doors) | {parent(name) for name in self.resolved.parameters}
