"""A plan bound to a model and checked: without its sequence-parallel overlay, with it, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Diagnostic, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import BESIDE_TP, Overlays, PlanFile, ResolvedPlan, overlays_of
from shardplan.core.report import of_both_variants, with_overlay_alone
from shardplan.core.tree import ModuleTree

if TYPE_CHECKING:
    from .layout import LayoutReport, ModelLayouts
    from .layout.stage_plan import StagedPlan


@dataclass(frozen=True)
class Variants:
    """The variants of one plan for one model.

    Args:
        resolved: the bound plan of each.
        findings: the findings about each.
        layouts: the results of the layout check, where it ran.
    """

    resolved: Mapping[Overlays, ResolvedPlan]
    findings: Mapping[Overlays, tuple[Diagnostic, ...]]
    layouts: Mapping[Overlays, LayoutReport] = field(default_factory=dict)

    @property
    def any_error(self) -> bool:
        return any(any_error(found) for found in self.findings.values())

    @property
    def secondary(self) -> tuple[Diagnostic, ...]:
        """The findings of all variants that follow from the mistakes that the layout check found."""
        return _merged({on: report.secondary for on, report in self.layouts.items()})

    @property
    def all_findings(self) -> tuple[Diagnostic, ...]:
        """The findings of all variants, each once."""
        return _merged(self.findings)

    def with_findings(self, more: Mapping[Overlays, tuple[Diagnostic, ...]]) -> Variants:
        """These variants with further findings."""
        return replace(self, findings={on: (*old, *more.get(on, ())) for on, old in self.findings.items()})

    def allowed(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the tp axis that divide what the layout check saw split."""
        lengths = {length for report in self.layouts.values() for length in report.lengths}
        return tuple(size for size in sizes if all(length % size == 0 for length in lengths))

    def at(self, tp: int | None) -> Variants:
        """These variants at another size of the tp axis."""
        return self.changed(lambda one: replace(one, sizes=replace(one.sizes, tp=tp)))

    def changed(self, change: Callable[[ResolvedPlan], ResolvedPlan]) -> Variants:
        """These variants with a change to each bound plan."""
        return replace(self, resolved={on: change(one) for on, one in self.resolved.items()})


def wanted_variants(plan: PlanFile, sequence_parallel: bool | None, sizes: MeshSizes) -> tuple[Overlays, ...]:
    """The variants that a user asks for; None means every one that the plan has. On a mesh with an axis ep, its
    variants come last."""
    both = sequence_parallel is None and plan.has_overlay
    asked = (False, True) if both else (bool(sequence_parallel),)
    context = plan.has_context
    return tuple(dict.fromkeys(overlays_of(on, mesh, context=context) for mesh in (None, sizes) for on in asked))


def bind_variants(plan: PlanFile, tree: ModuleTree, sizes: MeshSizes, wanted: Iterable[Overlays]) -> Variants:
    """Bind each variant: decide the rule of each module and parameter."""
    from .bind import bind

    bound = {overlays: bind(plan, tree, sizes, overlays) for overlays in wanted}
    return Variants({on: one for on, (one, _) in bound.items()}, {on: about for on, (_, about) in bound.items()})


def check_variants(variants: Variants, *, seq_len: int | None = None) -> Variants:
    """Add the findings of the structural checks."""
    from .check import check

    found = {
        on: (*variants.findings[on], *check(resolved, seq_len=seq_len)) for on, resolved in variants.resolved.items()
    }
    return Variants(variants.resolved, found)


def prove_layouts(variants: Variants, plan: PlanFile, model: ModelLayouts, *, allow_unproven: bool = False) -> Variants:
    """Add the findings of the layout check, which needs several ranks on tp, ep or cp; and, with several data-parallel
    ranks, the parameters that a forward changes; and, with these or several stages, random numbers that decide what runs. The plans must have no structural errors.

    Args:
        model: the model at the size of tp that is checked.
        allow_unproven: report obstacles to the proof as warnings, not errors.
    """
    sizes = next(iter(variants.resolved.values())).sizes
    reports = {
        on: model.check(plan, on, of_model=one, allow_unproven=allow_unproven)
        for on, one in variants.resolved.items()
        if (sizes.tp or 1) > 1 or on & BESIDE_TP
    }
    from .layout.drawn_choices import choice_findings
    from .layout.written_parameters import written_findings

    variants = variants.with_findings({on: written_findings(model, one) for on, one in variants.resolved.items()})
    drawn = (on for on in variants.resolved if on not in reports or reports[on].ok)
    variants = variants.with_findings({on: choice_findings(model, variants.resolved[on]) for on in drawn})
    return replace(variants, layouts=reports).with_findings({on: one.diagnostics for on, one in reports.items()})


def prove_stages(
    variants: Variants, plan: PlanFile, model: ModelLayouts, *, allow_unproven: bool = False, anyway: bool = False
) -> tuple[Variants, StagedPlan | None]:
    """Add the findings about the plan's pipeline stages, from recorded runs of the reduced model, and give each bound plan the
    parts of each stage. Does nothing for a plan without such a section. Without several pp ranks the findings are warnings.

    Args:
        model: the reduced model, at the size of tp that is checked.
        allow_unproven: as for `prove_layouts`.
        anyway: do so even if the layouts have errors.
    """
    first = next(iter(variants.resolved.values()))
    if first.pipeline_parallel is None or (variants.any_error and not anyway):
        return variants, None
    from .layout.stage_plan import staged_plan, with_stages

    severity = Severity.ERROR if first.sizes.pp > 1 else Severity.WARNING
    staged = staged_plan(plan, model, severity=severity, allow_unproven=allow_unproven)
    made = {on: with_stages(one, staged, severity) for on, one in variants.resolved.items()}
    known = set(variants.all_findings)  # the layout check has already reported a missing reduced model
    about = tuple(d for d in staged.findings if d not in known)
    found = {on: (*about, *unknown) for on, (_, unknown) in made.items()}
    return replace(variants, resolved={on: one for on, (one, _) in made.items()}).with_findings(found), staged


def _merged(found: Mapping[Overlays, tuple[Diagnostic, ...]]) -> tuple[Diagnostic, ...]:
    """The findings of all variants, merged: without and with sequence parallelism, then without and with the sections that apply on the mesh."""
    sides = by_key((on - {"sequence_parallel"}, about) for on, about in found.items())
    merged: tuple[Diagnostic, ...] = ()
    for i, (on, pair) in enumerate(sorted(sides.items(), key=lambda side: len(side[0]))):
        assert len(pair) <= 2, on  # without and with sequence parallelism
        side = of_both_variants(*pair) if len(pair) == 2 else pair[0]
        merged = with_overlay_alone(merged, side, max(on)) if i else side
    return merged


def any_error(findings: Iterable[Diagnostic]) -> bool:
    return any(d.is_error for d in findings)
