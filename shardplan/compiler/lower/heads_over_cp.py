"""The meaning of the rules for tp below a module whose heads are exchanged over cp.

Projections compute with whole weights on a rank's own tokens; moves around them change between slices of the sequence and
slices of the features. Values that the module's code reads itself, it reads by share. Numbers, features and channels
are those of a rank of an axis of tp * cp ranks: tp divides them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardplan.core.layout import R, V
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.module_program import (
    ContextProgram,
    HeadShare,
    InputMove,
    ModuleProgram,
    OutputMove,
    ParameterProgram,
)
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ancestors, full_name
from shardplan.styles import feature_dim
from shardplan.styles.bound import BoundModule, bound_modules
from shardplan.styles.style_record import MATMUL

FEATURES, WHOLE = V(-1).on(Axis.CP), R.on(Axis.CP)


def with_heads(
    plan: ResolvedPlan, programs: Mapping[str, ModuleProgram]
) -> tuple[dict[str, ModuleProgram], frozenset[str]]:
    """The programs, with new ones at and below modules whose heads are exchanged; and the names of these modules and of all below."""
    rules = plan.on_cp
    assert rules is not None
    rules = replace(rules, sizes=MeshSizes(tp=(plan.sizes.tp or 1) * (rules.sizes.tp or 1)))
    modules = bound_modules(rules)
    found, inside = dict(programs), set[str]()
    for name, one in modules.items():
        if one.style is not None and one.style.exchanges_heads:
            below = {name, *(other for other in modules if other.startswith(full_name(name, "")))}
            inside |= below
            exchange = _Exchange(plan, rules, programs, one)
            for other in modules:
                if other in below and (program := exchange.program(modules[other])) is not None:
                    found[other] = program
            found[name] = exchange.of_mixer(
                found.get(name) or ModuleProgram(name), [modules[n] for n in modules if n in below]
            )
    return found, frozenset(inside)


class _Exchange:
    """The meaning of the rules at and below one module.

    Args:
        plan: the plan with its rules for cp.
        rules: its rules for cp, over all ranks of both axes.
        programs: the programs of the rules for tp.
        mixer: the module whose heads are exchanged.
    """

    def __init__(
        self, plan: ResolvedPlan, rules: ResolvedPlan, programs: Mapping[str, ModuleProgram], mixer: BoundModule
    ):
        assert plan.on_cp is not None and mixer.assignment is not None and mixer.style is not None
        self.tp, self.cp = plan.sizes.tp or 1, plan.on_cp.sizes.tp or 1
        self.rules, self.programs, self.mixer, self.style = rules, programs, mixer, mixer.style.name
        self.reads = plan.cross_module_reads
        self.tokens = V(mixer.assignment.rule.seq_dim).on(Axis.CP)

    def program(self, one: BoundModule) -> ModuleProgram | None:
        """The program of a module below, or of the mixer itself, with its numbers. The mixer reads the shares of buffers over both axes."""
        base = self.programs.get(one.name) or ModuleProgram(one.name)
        fused = base.fused and (one.assignment is None or one.assignment.rule.fused)
        if self._projects(one):  # its own numbers are its weight's
            program = replace(base, fused=fused, buffers=(), on_cp=self._projection(one))
        else:
            program = replace(base, divide=one.divide, settings=one.settings, fused=fused, buffers=())
        if one.mean_ranks > 1:
            program = self._with_means(program, one)
        return None if program == ModuleProgram(one.name) else program

    def _projects(self, one: BoundModule) -> bool:
        """Whether a module is a projection below the mixer, and no code around it reads its weight directly. The
        inner parts of an adapted layer do not count."""
        around = ancestors(one.name)
        if one.module.kind not in MATMUL or self.mixer.name not in around:
            return False
        if any(self.rules.tree.modules[name].layer for name in around):
            return False
        own = {full_name(one.name, p.name) for p in one.parameters}
        return not any(own.intersection(self.reads.get(name, ())) for name in around)

    def _with_means(self, program: ModuleProgram, one: BoundModule) -> ModuleProgram:
        """The program of a norm whose features are split over neighbouring ranks of both axes, cp the inner one."""
        means = one.means(self.rules.sizes.tp or 1)
        over_cp, over_tp = min(means.ranks, self.cp), means.ranks // self.cp
        on_cp = ContextProgram(self.style, means=replace(means, ranks=over_cp))
        return replace(program, on_cp=on_cp, means=replace(means, ranks=over_tp) if over_tp > 1 else None)

    def of_mixer(self, program: ModuleProgram, below: list[BoundModule]) -> ModuleProgram:
        """The program of the mixer. It reads its share of values that are no input or output of a projection."""
        shares = (share for one in below for share in self._read_by_mixer(one))
        slices = tuple(replace(one, heads=one.heads and one.heads // self.tp) for one in self.mixer.slices)
        first, *others = self.mixer.boundary.inputs
        enter = tuple(
            InputMove(one.sources[0].on(Axis.CP), one.destination.on(Axis.CP), one.argument) for one in others
        )
        argument = first.argument or ""
        on_cp = ContextProgram(self.style, enter, hollow=argument, shares=tuple(shares), slices=slices)
        return replace(program, on_cp=on_cp)

    def _read_by_mixer(self, one: BoundModule) -> Iterator[HeadShare]:
        owner = one.name[len(self.mixer.name) :].lstrip(".")
        if not self._projects(one):
            yield from self._shares(one, owner)
        layer = full_name(owner, one.module.layer) if one.module.layer else owner
        for buffer in one.buffers:
            yield self._share(buffer, None, one.module.buffers[buffer.name], layer, buffer=True)

    def _shares(self, one: BoundModule, owner: str = "") -> Iterator[HeadShare]:
        for parameter in one.parameters:
            info = next((info for info in one.module.parameters if info.name == parameter.name), None)
            if parameter.dim is not None and parameter.computed.kind in "VR" and info is not None:
                yield self._share(parameter, self._over_tp(one, parameter.name), info.shape, owner)

    def _share(
        self,
        program: ParameterProgram,
        over_tp: ParameterProgram | None,
        shape: tuple[int, ...],
        owner: str = "",
        *,
        buffer: bool = False,
    ) -> HeadShare:
        assert program.dim is not None
        return HeadShare(program, over_tp, shape[program.dim], self.tp, self.cp, owner, buffer)

    def _over_tp(self, one: BoundModule, name: str) -> ParameterProgram | None:
        program = self.programs.get(one.name)
        if self.tp == 1 or program is None:
            return None
        return next((p for p in program.parameters if p.name == name), None)

    def _projection(self, one: BoundModule) -> ContextProgram:
        shares = {share.over_both.name: share for share in self._shares(one)}
        info, output = one.module.parameter("weight"), one.boundary.output
        weight = None if info is None else shares.get(info.name)
        features = None if info is None else feature_dim(one.module.kind, "weight", "in", len(info.shape))
        gathered = output is None or output.destination == R
        if weight is None or (weight.dim != features and gathered and output is not None):
            return ContextProgram(self.style, leave=OutputMove(self.tokens, WHOLE), takes=True)
        if weight.dim != features:
            leave = OutputMove(self.tokens, FEATURES)
            return ContextProgram(self.style, (), leave, takes=True, features=weight, shares=tuple(shares.values()))
        whole = one.boundary.inputs and V(-1) not in one.boundary.inputs[0].sources
        enter = InputMove(WHOLE if whole else FEATURES, self.tokens)
        leaves = OutputMove(self.tokens, WHOLE) if output is not None and gathered else None
        return ContextProgram(self.style, (enter,), leaves, features=weight)
