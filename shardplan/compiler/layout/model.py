"""The layout check of plans for one model, on its reduced model, which is made and run once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from shardplan.compiler.bind import bind
from shardplan.compiler.check.exchanged_heads import exchanges_heads, heads_shared_over_cp
from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.module_program import Draws
from shardplan.core.plan import NO_OVERLAYS, Overlays, PlanFile, ResolvedPlan
from shardplan.core.proof_meshes import proof_meshes, ranks_over_cp
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, named
from shardplan.model import FoundModel, tree_of
from shardplan.model.reduced.named_reduced import NOT_REDUCED
from shardplan.model.reduced.own_copies import NOT_CARRIED
from shardplan.model.reduced.reduced_model import NOT_RUNNING, ReducedModel, make_reduced_model
from shardplan.styles import STYLES
from shardplan.styles.divided_numbers import shared_heads
from shardplan.torchlib.modes import reduced_runs

from . import randomness
from .cross_module_reads import cross_module_reads_of, read_results_of
from .drawing_operands import OWN_CODE, WHOLE_FEATURES, DrawingOperand
from .draws import WHOLE, Noise, decide, noise_of, unmanaged
from .dropout import active_probabilities, around_compiled
from .layout_check import LayoutReport, Search, bound_to, check_layout, with_cp
from .layout_diagnostics import UNTYPED
from .names_in_model import Alike, disagreeing, incoming_of, modules_of, same_arguments_of, shared_reads_of
from .run import RecordedModel
from .solver.block_rules import BlockRules
from .split_lengths import misfit, split_lengths
from .unsummed import acting, dropping
from .whole_experts import outside_findings, token_findings

STAGES = 3  # a first, a middle and a last one


@dataclass(frozen=True)
class _Checked:
    """The state of the check of one plan: the tries that are left, and the report of each variant."""

    plan: PlanFile
    search: Search
    reports: dict[Overlays, LayoutReport] = field(default_factory=dict)


class ModelLayouts:
    """Checks plans for a model at one size of the tp axis.

    Args:
        found: the model.
        tp, ep: the sizes of the axes.
        heads_times: how many times the usual number of heads its reduced model has; `fit` may raise it.
        cp: the size of the axis cp; above 1 where the checked plans have rules for it.
        shared: number of key-value heads in the model, if several ranks of cp share each -> their number on a rank of
            tp in the reduced model (`heads_shared_over_cp`).
        over_cp: the number of ranks of cp that shows what its rules do.
        pp, blocks: with pp above 1, the reduced model has blocks for a first, a middle and a last stage, or as many as `blocks` says.
    """

    def __init__(
        self,
        found: FoundModel,
        tp: int,
        ep: int = 1,
        heads_times: int = 1,
        pp: int = 1,
        blocks: int = 0,
        cp: int = 1,
        shared: Mapping[int, int] = MappingProxyType({}),
        over_cp: int = 2,
    ):
        self.found, self.tp, self.ep, self.heads_times, self.pp, self.cp = found, tp, ep, heads_times, pp, cp
        self.blocks, self.shared, self.over_cp = blocks or min(pp, STAGES), dict(shared), over_cp
        self.branches: Callable[[ReducedModel], ReducedModel] = lambda model: model
        self._plans: dict[int, _Checked] = {}
        self._recorded: dict[frozenset[str], tuple[RecordedModel, ...]] = {}

    @classmethod
    def for_mesh(
        cls, found: FoundModel, resolved: Collection[ResolvedPlan], sizes: MeshSizes, *, whole: bool, blocks: int = 0
    ) -> ModelLayouts:
        """The model at the sizes that represent a mesh.

        Args:
            resolved: variants of a plan, bound to the model.
            whole: use the sizes of the mesh itself, not those of the first mesh for the proof.
            blocks: the number of blocks of a pipeline's schedule; 0: as the mesh says.
        """
        shared = heads_shared_over_cp(resolved, sizes, exact=whole or not found.shrinks)
        kept = not found.shrinks and any(map(exchanges_heads, resolved))
        over_cp = ranks_over_cp(shared, sizes if kept else None)
        first = sizes if whole else proof_meshes(sizes, over_cp=over_cp)[0]
        axes = {"pp": blocks or sizes.pp, "blocks": blocks, "cp": first.cp}
        return cls(found, sizes.of(Axis.TP), first.ep, **axes, shared=shared, over_cp=over_cp)

    def of(self, **changes: Any) -> ModelLayouts:
        """The same model with other sizes."""
        other = ModelLayouts(self.found, **{**self.axes, **changes})
        other.branches = self.branches
        return other

    @property
    def axes(self) -> dict[str, Any]:
        """The arguments other than the model."""
        return {
            name: getattr(self, name) for name in ("tp", "ep", "heads_times", "pp", "blocks", "cp", "shared", "over_cp")
        }

    @property
    def sizes(self) -> MeshSizes:
        """The smallest mesh with these axes."""
        return MeshSizes(tp=self.tp, ep=self.ep, dp_shard=max(1, self.ep // self.tp), cp=self.cp)

    @cached_property
    def reduced_model(self) -> ReducedModel:
        """The reduced model.

        Raises:
            PlanError: SP520, SP521, SP522: there is none.
        """
        # Experts one by one: grouped multiplications need sizes that a reduced model's shards may not have, and take no
        # float64.
        experts = "eager" if self.found.config is not None else None
        made = make_reduced_model(
            self.found,
            tp=self.tp,
            ep=self.ep,
            cp=self.cp,
            experts_implementation=experts,
            heads_times=self.heads_times,
            layers=self.blocks,
            shared=self.shared,
        )
        return self.branches(made)

    def with_branches(self, branches: Callable[[ReducedModel], ReducedModel]) -> ModelLayouts:
        """The same with reduced models of the same modules, at all sizes, whose code takes other branches; the known layouts stay."""
        other = copy(self)
        other.branches, other.reduced_model = branches, branches(self.reduced_model)
        return other

    def fit(self, plan: PlanFile, overlays: Iterable[Overlays]) -> bool:
        """Give the reduced model enough heads for a plan that fits the model itself: if the plan splits groups of
        heads, each rank gets a group.

        Returns:
            Whether some number fits; if not, the number stays as it was.
        """
        variants = tuple(overlays)
        for times in range(2 * self.heads_times, BOUNDS.heads_times + 1, self.heads_times):
            larger = self.of(heads_times=times)
            if larger.runs and not any(bound_to(larger.tree, plan, larger.sizes, on)[1] for on in variants):
                self._forget(times)
                return True
        return False

    def _forget(self, heads_times: int) -> None:
        """Replace the reduced model by one with another number of heads; nothing is known of it yet."""
        self.heads_times = heads_times
        for name in ("reduced_model", "recorded_models", "noise", "block_rules"):
            vars(self).pop(name, None)
        self._recorded.clear()
        self._plans.clear()

    @cached_property
    def recorded_models(self) -> tuple[RecordedModel, ...]:
        """The reduced model with each kind of input that it takes. At tp 1 it has more heads if its code divides them into more parts.

        Raises:
            PlanError: there is none, or it does not run (SP523).
        """
        try:
            return self._recordings()
        except PlanError as error:
            if self.tp > 1 or self.found.config is None or [d.code for d in error.diagnostics] != [NOT_RUNNING]:
                raise
            times = 2 * self.heads_times
            larger = self.of(heads_times=times)
            if times > BOUNDS.heads_times or not larger.runs:
                raise
            self._forget(larger.heads_times)
            return self._recordings()

    def _recordings(self) -> tuple[RecordedModel, ...]:
        model = self.reduced_model.build()
        tree = tree_of(model)
        with self.reduced_model.running():
            recorded_models = tuple(
                RecordedModel(model, self.reduced_model.inputs(kind=kind), tree) for kind in self.reduced_model.kinds
            )
            for recorded in recorded_models:
                if not recorded.reference.finite:
                    raise ArithmeticError("its result is not finite")
        return recorded_models

    @cached_property
    def block_rules(self) -> BlockRules:
        """The rules that `init` would write for the blocks."""
        return BlockRules(self.recorded_models, self.tp, self.found.tree)

    def recorded_for(self, resolved: ResolvedPlan) -> tuple[RecordedModel, ...]:
        """The recorded_models for a plan. A module of experts is one operation if the plan distributes it or runs it on each
        rank's own tokens: which experts a rank runs depends on its tokens.

        Args:
            resolved: the plan, bound to the reduced model. If the plan has rules for cp: either these (`on_cp`) or the others.
        """
        experts = frozenset(
            name
            for name, a in resolved.modules.items()
            if STYLES[a.rule.style].experts is not None
            or (STYLES[a.rule.style].weight.as_input and has_stacks(resolved.tree.modules[name]))
        )
        if not experts:
            return self.recorded_models
        if experts not in self._recorded:
            with self.reduced_model.running():
                made = (RecordedModel(one.model, one.inputs, one.tree, experts) for one in self.recorded_models)
                self._recorded[experts] = tuple(made)
        return self._recorded[experts]

    @property
    def random(self) -> Diagnostic | None:
        """SP371: the model's code draws random numbers; in the reduced model's names.

        Raises:
            PlanError: there is no reduced model, or it does not run.
        """
        sites = self._sites()
        return randomness.finding(self.found.name, sites, self.tp) if sites else None

    def _sites(self, alike: Collection[DrawingOperand] | None = None) -> tuple[randomness.Site, ...]:
        """The places that draw.

        Args:
            alike: leave out places in modules whose own code has only whole values: all ranks draw the same numbers for them.
        """
        sites = tuple(dict.fromkeys(site for recorded in self.recorded_models for site in recorded.random))
        if alike is None:
            return sites
        kinds = {
            site.module: {o.kind for o in alike if (o.module, o.name) == (site.module, OWN_CODE)} for site in sites
        }
        return tuple(s for s in sites if not s.module or not kinds[s.module] or not kinds[s.module] <= WHOLE)

    @property
    def drawing(self) -> tuple[randomness.Site, ...]:
        """The places that draw, but for dropout, also where the model's own probabilities are above 0.

        Raises:
            PlanError: as `noise`.
        """
        return tuple(dict.fromkeys((*self._sites(), *(site for one in self.noise for site in one.unmanaged))))

    @property
    def tree(self) -> ModuleTree:
        """The module tree of the reduced model."""
        return self.recorded_models[0].tree

    @property
    def runs(self) -> bool:
        """Whether there is a reduced model, and it runs unsharded."""
        try:
            return bool(self.recorded_models)
        except PlanError:
            return False

    @reduced_runs()
    def check(
        self,
        plan: PlanFile,
        overlays: Overlays = NO_OVERLAYS,
        *,
        of_model: ResolvedPlan | None = None,
        help: bool = True,
        allow_unproven: bool = False,
    ) -> LayoutReport:
        """Check a plan that has no structural errors for the model itself.

        The incoming layouts and shared reads are those of the model's modules.

        Args:
            of_model: the variant bound to the model itself; it says what is compiled.
            help: look for the changes that fix the findings.
            allow_unproven: report obstacles to the check as warnings, not errors: an unproven plan does not count as
                right.
        """
        if (too_many := self._too_many(plan)) is not None:
            return LayoutReport((too_many,))
        try:
            recorded_models = self.recorded_models
        except PlanError as error:
            return LayoutReport(self._untyped(unproven(d, allow_unproven) for d in error.diagnostics))
        try:
            drawing = self.drawing
        except PlanError as error:
            return LayoutReport(error.diagnostics)
        at_once = drawing if self.tp == 1 else self._sites()  # what draws by a probability is SP370 at several tp ranks
        if others := tuple(site for site in at_once if site.name == randomness.OTHERS):
            return LayoutReport((self._about_the_model(randomness.finding(self.found.name, others, self.tp)),))
        resolved, structure = bound_to(recorded_models[0].tree, plan, self.sizes, overlays)
        if structure and self.fit(plan, (overlays,)):
            resolved, _ = bind(plan, self.tree, self.sizes, overlays)
        elif structure:
            return LayoutReport(self._untyped((_not_small(self.found.name, structure, allow_unproven),)))
        if self.tp > 1 and self._sites():  # a fix of the layouts would not help there
            sliced = self._sites(self.check_copy(resolved).operands)
            if sliced:
                return LayoutReport((self._about_the_model(randomness.finding(self.found.name, sliced, self.tp)),))
        if resolved.on_cp is not None and (
            sites := (*drawing, *(site for one in self.noise for site in one.dropped if site.name in WHOLE_FEATURES))
        ):  # a rank would draw for its own tokens alone
            drawn = randomness.finding(self.found.name, sites, self.cp, Axis.CP)
            return LayoutReport((self._about_the_model(drawn),))
        report = self.layouts_of(plan, resolved, help=help)
        draws, undrawn = self._draws(report, of_model)
        alike = Alike(self.found.tree, self.tree)
        unlike = disagreeing(alike, report.incoming)
        # Without a configuration, the reduced model has the model's sizes, and nothing else tells which of them tp must divide.
        lengths_count = report.ok and not overlays and self.found.config is None
        return replace(
            report,
            draws=draws,
            incoming=incoming_of(alike, report.incoming),
            cross_module_reads=cross_module_reads_of(self.found.tree, report.cross_module_reads),
            shared_reads=shared_reads_of(alike, report.shared_reads),
            same_arguments=same_arguments_of(alike, report.same_arguments),
            read_results=read_results_of(self.found.tree, report.read_results),
            summed=report.summed - {one.rule.location for one, name in report.through if acting(self.found.tree, name)},
            diagnostics=(
                *map(self._about_the_model, report.diagnostics),
                *dropping(self.found.tree, report.through),
                *undrawn,
                *((_undetermined(unlike, allow_unproven),) if unlike else ()),
                *((_unseen(self.found.name, self.reduced_model.unseen),) if self.reduced_model.unseen else ()),
            ),
            secondary=tuple(map(self._about_the_model, report.secondary)),
            lengths=split_lengths(resolved, recorded_models[0]) if lengths_count else {},
        )

    @cached_property
    def noise(self) -> tuple[Noise, ...]:
        """The runs of the reduced model with the model's own dropout, for each kind of input.

        Raises:
            PlanError: there is no reduced model, or it does not run.
        """
        with self.reduced_model.running():
            return tuple(noise_of(recorded, self.found.tree) for recorded in self.recorded_models)

    def _draws(
        self, report: LayoutReport, of_model: ResolvedPlan | None
    ) -> tuple[Mapping[str, Draws], tuple[Diagnostic, ...]]:
        """Whose random numbers each module draws; nothing for a plan with errors, as it does not show what is right."""
        if self.tp == 1 or not report.ok:
            return {}, ()
        try:
            noise = self.noise
        except PlanError as error:
            return {}, error.diagnostics
        draws, wrong = decide(self.found.tree, self.tree, noise, report.operands)
        draws = {**dict.fromkeys(self.names_in_model({s.module: None for s in self._sites()}), "common"), **draws}
        if of_model is None:
            return draws, wrong
        draws, mixed = around_compiled(draws, of_model)
        return draws, (*wrong, *mixed)

    def _untyped(self, why: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
        """The reasons why the layouts are unknown. If these are accepted as warnings, active dropout is still an error (SP370)."""
        found = tuple(why)
        active = tuple(active_probabilities(self.found.tree))
        if self.tp == 1 or not active or any(d.is_error for d in found):
            return found
        return (*found, unmanaged(active))

    def _too_many(self, plan: PlanFile) -> Diagnostic | None:
        """A finding if tp does not divide a dim that the code of a model without configuration splits. The check runs
        at the smallest size that divides tp: with all ranks, the model may not run or may not split the dim."""
        least = next((n for n in range(2, self.tp) if self.tp % n == 0), None)
        if self.found.config is not None or least is None:
            return None
        fewer = ModelLayouts(self.found, least)
        if not fewer.runs:
            return None
        resolved, _ = bind(plan, self.found.tree, MeshSizes(tp=self.tp))
        heads = {self.tp // copies for copies in shared_heads(resolved).values()}  # several ranks compute with each
        lengths = fewer.check(plan, help=False).lengths
        return misfit({n: where for n, where in lengths.items() if n not in heads}, self.tp, least)

    def layouts_of(self, plan: PlanFile, resolved: ResolvedPlan, *, help: bool = False) -> LayoutReport:
        """The layouts of a variant of a plan on the reduced model, in its names. Each variant is checked once.

        Args:
            resolved: the variant, bound to the reduced model.
        """
        checked = self._plans.setdefault(id(plan), _Checked(plan, Search(solved=self.block_rules.repairs)))
        if resolved.overlays not in checked.reports:
            checked.reports[resolved.overlays] = self.check_copy(resolved, help=help, search=checked.search)
        return checked.reports[resolved.overlays]

    def names_in_model(self, names: Iterable[str]) -> tuple[str, ...]:
        """The model's modules or parameters that those of the reduced model represent."""
        return modules_of(self.found.tree, self.tree, self.reduced_model.layers, tuple(names))

    @reduced_runs()
    def check_copy(self, resolved: ResolvedPlan, *, help: bool = False, search: Search | None = None) -> LayoutReport:
        """As `check`, but for a plan bound to the reduced model's tree, and in its names.

        Args:
            help: look for the changes that fix what is wrong.
            search: the limit of that search; None: as much as for a plan of its own.

        Raises:
            PlanError: there is no reduced model, or it does not run.
        """
        recorded_models = self.recorded_for(resolved)
        if help and search is None:
            search = Search(solved=self.block_rules.repairs)
        report = check_layout(resolved, recorded_models, help=help, search=search) if self.tp > 1 else LayoutReport()
        report = (
            report if resolved.on_cp is None else with_cp(report, resolved.on_cp, self.recorded_for(resolved.on_cp))
        )
        if not report.ok:
            return report
        found = token_findings(
            resolved, recorded_models, self.ep if "expert_parallel" in resolved.overlays else self.tp
        )
        if self.tp == 1:  # at other sizes the runs of the ranks show it
            found = (*outside_findings(resolved, recorded_models), *found)
        return replace(report, diagnostics=found, repairs=(None,) * len(found))

    def _about_the_model(self, diagnostic: Diagnostic) -> Diagnostic:
        """The finding with the model's modules in place of its reduced model's."""
        return replace(diagnostic, modules=self.names_in_model(diagnostic.modules))


def has_stacks(module: ModuleInfo) -> bool:
    """Whether a module has a matrix for each of several experts."""
    return any(len(parameter.shape) > 2 for parameter in module.parameters)


ACCEPT = "accept a plan that is not proven (`--allow-unproven`, `allow_unproven=True`)"
UNPROVEN_HELP = f"provide what is missing, or {ACCEPT}"


def unproven(diagnostic: Diagnostic, allowed: bool) -> Diagnostic:
    """The reason why a plan is not proven: an error or, where that is accepted, a warning. A proof of another model
    than the given one (SP524, SP526) cannot be accepted."""
    if diagnostic.code in (NOT_CARRIED, NOT_REDUCED):
        return diagnostic
    return replace(
        diagnostic,
        severity=Severity.WARNING if allowed else Severity.ERROR,
        message=f"{diagnostic.message}: this plan is not proven",
        help=diagnostic.help if allowed else "\n".join(filter(None, (diagnostic.help, UNPROVEN_HELP))),
    )


def _unseen(name: str, why: str) -> Diagnostic:
    return Diagnostic(
        code=UNTYPED,
        severity=Severity.WARNING,
        message=f"{name} accepts images, but its reduced model cannot be given any: this plan is proven for text alone",
        notes=(why,),
    )


def _undetermined(names: tuple[str, ...], allowed: bool) -> Diagnostic:
    found = Diagnostic(
        code=UNTYPED,
        severity=Severity.ERROR,
        message=f"the layers of {named(names)} have the same classes, but their inputs have different layouts: the layout is not known for a "
        "layer that the reduced model leaves out",
        modules=names,
    )
    return unproven(found, allowed)


def _not_small(name: str, findings: Iterable[Diagnostic], allowed: bool) -> Diagnostic:
    found = Diagnostic(
        code=UNTYPED,
        severity=Severity.ERROR,
        message=f"the plan fits {name}, but not the reduced model on which it would be proven",
        notes=tuple(d.message for d in findings),
    )
    return unproven(found, allowed)
