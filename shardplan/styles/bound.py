"""A bound plan, module by module: the moves at each boundary, and how parameters are stored and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardplan.core.layout import I, P
from shardplan.core.mesh import Axis
from shardplan.core.module_program import ArgumentSlice, ExpertsProgram, FeatureMeans, ParameterProgram
from shardplan.core.plan import Assignment, ResolvedPlan
from shardplan.core.tree import ModuleInfo, ancestors

from . import STYLES
from .boundary import Boundary, boundary
from .divided_numbers import divided, mean_ranks, settings, shared_heads
from .stored_parameters import lower_parameters
from .style_record import Features, Style, feature_dim
from .tensor_shares import tensor_shares
from .token_layouts import tokens_layout


@dataclass(frozen=True, slots=True)
class BoundModule:
    """One module, and the meaning of a plan's rules for it.

    Args:
        module: the module in the plan's tree.
        assignment: its rule, or None.
        parameters: every parameter that it owns.
        boundary: the moves of the values that cross its boundary; SEQ is replaced by the rule's `seq_dim`.
        tail: the number of trailing output features that pass a move I -> R; 0: none.
        link: as in `core.module_program.ModuleProgram`.
        divide: attributes of the instance, and the divisor of each.
        settings: attributes of the instance, and the value of each on a rank.
        slices: arguments that a rank reads its share of.
        buffers: buffers that a rank reads its share of.
        mean_ranks: the number of neighbouring ranks that share the features of a mean in the forward; else 1.
        experts: as in `core.module_program.ModuleProgram`.
        scope: for an output that stays partial `until_block_input`: the module inside whose forward it is a partial
            sum; None if no module contains both.
    """

    module: ModuleInfo
    assignment: Assignment | None
    parameters: tuple[ParameterProgram, ...]
    boundary: Boundary
    tail: int = 0
    link: Link | None = None
    divide: tuple[tuple[str, int], ...] = ()
    settings: tuple[tuple[str, int], ...] = ()
    slices: tuple[ArgumentSlice, ...] = ()
    buffers: tuple[ParameterProgram, ...] = ()
    mean_ranks: int = 1
    experts: ExpertsProgram | None = None
    scope: str | None = None

    @property
    def name(self) -> str:
        return self.module.name

    @property
    def style(self) -> Style | None:
        return STYLES[self.assignment.rule.style] if self.assignment else None

    @property
    def grouped(self) -> bool:
        """Whether each group of the features has its own mean."""
        return self.assignment is not None and self.assignment.rule.groups is not None

    @property
    def vocabulary(self) -> int | None:
        """The number of rows of the whole table, if they are looked up by id and split."""
        return self._length("in") if self.style is not None and self.style.splits_rows else None

    @property
    def width(self) -> int | None:
        """The number of output features of its whole weight; None if it has no such dim."""
        return self._length("out")

    def means(self, ranks: int) -> FeatureMeans:
        """The means over features that are spread over the ranks of an axis. Each feature counts once per rank that has it."""
        copies = max((n for p in self.parameters if p.shared for n in p.gathered_from(ranks)), default=1)
        assert self.width is not None, self.name  # its style splits a weight
        return FeatureMeans(self.width * copies * self.mean_ranks // ranks, self.mean_ranks, self.grouped)

    def _length(self, features: Features) -> int | None:
        weight = self.module.parameter("weight")
        dim = feature_dim(self.module.kind, "weight", features, len(weight.shape)) if weight is not None else None
        return weight.shape[dim] if weight is not None and dim is not None else None


def bound_modules(plan: ResolvedPlan) -> Mapping[str, BoundModule]:
    """Every module of a plan's tree, by name, in the tree's order."""
    ends = links(plan)
    scope = next((name for name, link in ends.items() if link == "scope"), None)
    shared = shared_heads(plan)
    return {name: _bound(plan, module, ends.get(name), scope, shared) for name, module in plan.tree.modules.items()}


def _bound(
    plan: ResolvedPlan, module: ModuleInfo, link: Link | None, scope: str | None, shared: Mapping[str, int]
) -> BoundModule:
    assignment, parameters = plan.modules.get(module.name), lower_parameters(plan, module)
    divide = divided(plan, module, shared)
    local = settings(plan, module, parameters, divide)
    if assignment is None:
        return BoundModule(module, None, parameters, Boundary(), link=link, divide=divide, settings=local)
    style, rule = STYLES[assignment.rule.style], assignment.rule
    weight = next((p.computed for p in parameters if p.name == "weight" and p.shared and not p.parts), None)
    crossing, tensors = boundary(rule).on(plan.axis).at(rule.seq_dim), tuple(tensor_shares(plan, module, rule))
    return BoundModule(
        module,
        assignment,
        parameters,
        boundary=crossing if weight is None else crossing.of_heads(weight.copies),
        tail=plan.tree.count_near(module.name, style.features.tail)
        if style.features.tail and plan.axis is Axis.TP
        else 0,
        link=link,
        divide=divide,
        settings=local,
        slices=tuple(one for one in tensors if isinstance(one, ArgumentSlice)),
        buffers=tuple(one for one in tensors if isinstance(one, ParameterProgram)),
        mean_ranks=mean_ranks(plan, rule) if style.features.means else 1,
        experts=_experts(plan, module, assignment),
        scope=scope if link == "source" else None,
    )


def _experts(plan: ResolvedPlan, module: ModuleInfo, assignment: Assignment) -> ExpertsProgram | None:
    style = STYLES[assignment.rule.style]
    shape = module.parameters[0].shape if module.parameters else ()
    if style.experts is None or not shape:  # a rule that names no stack is a finding of its own
        return None
    count = shape[0]
    if not style.exchanges:
        return ExpertsProgram(count)
    sliced = (plan.sizes.tp or 1) > 1 and tokens_layout(plan, module.name) == I
    return ExpertsProgram(count, assignment.rule.exchange or "once", sliced)


# The sequence-parallel entrance of a plan, and the modules at its ends.
Link = Literal["source", "block_input", "scope"]


def links(plan: ResolvedPlan) -> Mapping[str, Link]:
    """The parts of the entrance, by module: embeddings that stay partial, the block input, the module around both.

    An embedding outputs its partial sum only inside a forward of the module around both.
    """
    block_inputs = [n for n, a in plan.modules.items() if {I, P} <= {*STYLES[a.rule.style].input_sources}]
    if not block_inputs:
        return {}
    sources = {n: style for n, a in plan.modules.items() if (style := STYLES[a.rule.style]).until_block_input}
    if all(style.output_source != P for style in sources.values()):  # whole tables begin no sum
        sources = {}
    inner = [*block_inputs, *sources]
    scope = next(
        a
        for a in ancestors(block_inputs[0])
        if plan.tree.modules[a].kind != "list" and all(a in ancestors(other) for other in inner)
    )
    return {**dict.fromkeys(sources, "source"), **dict.fromkeys(block_inputs, "block_input"), scope: "scope"}
