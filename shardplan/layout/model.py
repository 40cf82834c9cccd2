"""The layout check of plans for one model: on its small copy, which is made and run once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from shardplan.bind import bind
from shardplan.check import check as check_structure
from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.layout import Layout
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan
from shardplan.core.tree import ModuleTree, block, element
from shardplan.models import FoundModel, tree_of
from shardplan.torchlib.modes import outside_modes
from shardplan.twin import Twin, make_twin

from .check import LayoutReport, check_layout
from .codes import UNTYPED
from .elsewhere import elsewhere_of
from .run import Workbench
from .unsummed import acting, dropping


class ModelLayouts:
    """Checks plans for a model at one size of the tp axis.

    Args:
        found: the model.
        tp: the size of the axis.
    """

    def __init__(self, found: FoundModel, tp: int):
        self.found, self.tp = found, tp

    @cached_property
    def twin(self) -> Twin:
        """The small copy.

        Raises:
            PlanError: SP520, SP521, SP522: there is none.
        """
        # Experts one by one: grouped multiplications want sizes that a small copy's shards may not have, and no float64.
        experts = "eager" if self.found.config is not None else None
        return make_twin(self.found, tp=self.tp, experts_implementation=experts)

    @cached_property
    def benches(self) -> tuple[Workbench, ...]:
        """The small copy with each kind of input that it takes.

        Raises:
            PlanError: there is none, or it does not run (SP523).
        """
        model = self.twin.build()
        tree = tree_of(model)
        with self.twin.running():
            benches = tuple(Workbench(model, self.twin.inputs(kind=kind), tree) for kind in self.twin.kinds)
            for bench in benches:
                if not bench.reference.finite:
                    raise ArithmeticError("its result is not finite")
        return benches

    @outside_modes()
    def check(self, plan: PlanFile, *, sequence_parallel: bool, help: bool = True) -> LayoutReport:
        """Check a plan that is free of structural errors for the model itself.

        The arrivals and shared reads are those of the model's modules. What keeps the check from running at all is a warning: a
        plan is not wrong because its model cannot be copied.
        """
        try:
            benches = self.benches
        except PlanError as error:
            return LayoutReport(tuple(_unproven(d) for d in error.diagnostics))
        tree = benches[0].tree
        resolved, about = bind(plan, tree, MeshSizes(tp=self.tp), sequence_parallel=sequence_parallel)
        structure = [d for d in (*about, *check_structure(resolved, seq_len=None)) if d.is_error]
        if structure:
            return LayoutReport((_not_small(self.found.name, structure),))
        report = self.check_copy(resolved, help=help)
        return replace(
            report,
            arrivals=arrivals_of(self.found.tree, report.arrivals),
            elsewhere=elsewhere_of(self.found.tree, report.elsewhere),
            shared_reads=shared_reads_of(self.found.tree, report.shared_reads),
            summed=report.summed - {one.rule.location for one, name in report.through if acting(self.found.tree, name)},
            diagnostics=(
                *(self._about_the_model(d, tree) for d in report.diagnostics),
                *dropping(self.found.tree, report.through),
                *((_unseen(self.found.name, self.twin.unseen),) if self.twin.unseen else ()),
            ),
            secondary=tuple(self._about_the_model(d, tree) for d in report.secondary),
        )

    @outside_modes()
    def check_copy(self, resolved: ResolvedPlan, *, help: bool = False) -> LayoutReport:
        """As `check`, for a plan that is bound to the small copy's tree, and in its names.

        Args:
            help: look for the changes that mend what is wrong.

        Raises:
            PlanError: there is no small copy, or it does not run.
        """
        return check_layout(resolved, self.benches, help=help)

    def _about_the_model(self, diagnostic: Diagnostic, small: ModuleTree) -> Diagnostic:
        """The finding with the model's modules in place of its small copy's."""
        return replace(diagnostic, modules=modules_of(self.found.tree, small, self.twin.layers, diagnostic.modules))


def arrivals_of(tree: ModuleTree, arrivals: Mapping[str, Layout]) -> Mapping[str, Layout]:
    """The arrivals at a model's modules, from those at its small copy's, where all layers agree."""
    known: dict[str, set[Layout]] = {}
    for name, layout in arrivals.items():
        known.setdefault(tree.pattern(name), set()).add(layout)
    return {name: next(iter(found)) for name in tree.modules if len(found := known.get(tree.pattern(name), set())) == 1}


def modules_of(tree: ModuleTree, small: ModuleTree, layers: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """The modules or parameters of a model that those of its small copy stand for: every layer where all kinds of layers
    are among them, else the layers that were copied."""
    here, there = ({*one.modules, *one.parameters} for one in (tree, small))
    result: dict[str, None] = {}
    for name in names:
        pattern = tree.pattern(name)
        if all(other in names for other in there if tree.pattern(other) == pattern):
            result.update(
                (other, None) for other in (*tree.modules, *tree.parameters) if tree.pattern(other) == pattern
            )
            continue
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        known = number is not None and number < len(layers)
        moved = name.replace(f".{number}.", f".{layers[number]}.", 1) if known else name
        result[moved if moved in here else name] = None
    return tuple(result)


def shared_reads_of(tree: ModuleTree, reads: Mapping[str, str]) -> Mapping[str, str]:
    """The shared reads of a model's modules, from those of its small copy's, where all layers agree."""
    known: dict[str, set[str]] = {}
    for name, first in reads.items():
        known.setdefault(tree.pattern(name), set()).add(first.removeprefix(_home(name)))
    found = ((name, known.get(tree.pattern(name), set())) for name in tree.modules)
    return {name: _home(name) + next(iter(firsts)) for name, firsts in found if len(firsts) == 1}


def _home(name: str) -> str:
    return block(name) if element(block(name)) else ""


def _unproven(diagnostic: Diagnostic) -> Diagnostic:
    return replace(
        diagnostic,
        severity=Severity.WARNING,
        message=f"{diagnostic.message}: the layouts of this plan are not proven",
    )


def _unseen(name: str, why: str) -> Diagnostic:
    return Diagnostic(
        code=UNTYPED.code,
        severity=Severity.WARNING,
        message=f"{name} takes images that its small copy could not be given: this plan is proven for text alone",
        notes=(why,),
    )


def _not_small(name: str, findings: list[Diagnostic]) -> Diagnostic:
    return Diagnostic(
        code=UNTYPED.code,
        severity=Severity.WARNING,
        message=f"the plan fits {name}, but not the small copy on which layouts are proven: they are not proven",
        notes=tuple(d.message for d in findings),
    )
