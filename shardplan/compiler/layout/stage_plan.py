"""A plan's pipeline stages on the reduced model, and what they mean for the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.compiler.bind import bind
from shardplan.compiler.check.field_places import field_label
from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.plan import PlanFile, ResolvedPlan
from shardplan.core.stages import HandedOn
from shardplan.core.tree import ancestors, full_name
from shardplan.torchlib.modes import reduced_runs

from .model import ModelLayouts, unproven
from .stage_check import CutFacts, cut_facts
from .stage_findings import stage_findings, unread
from .stage_reads import StageParts, outermost, stage_root


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """What the recorded runs of the reduced model show of a plan's stages.

    Args:
        resolved: the plan bound to the reduced model, with everything that `pipeline_cut` reads; None where there is no reduced
            model, or its blocks are not those of the plan.
        facts: None likewise.
        findings: about the plan, in the names of the model itself.
    """

    resolved: ResolvedPlan | None
    facts: CutFacts | None
    findings: tuple[Diagnostic, ...]

    @property
    def ok(self) -> bool:
        return not any(d.is_error for d in self.findings) and self.facts is not None and self.facts.proven


@reduced_runs()
def staged_plan(
    plan: PlanFile, model: ModelLayouts, *, severity: Severity = Severity.ERROR, allow_unproven: bool = False
) -> StagedPlan:
    """Look at the stages of a plan without structural errors.

    Args:
        severity: the severity of findings about the cut.
        allow_unproven: report obstacles to making or calling the reduced model as warnings.
    """
    try:
        recorded_models = model.recorded_models
    except PlanError as error:
        asked = severity is Severity.ERROR
        return StagedPlan(None, None, tuple(unproven(d, allow_unproven) for d in error.diagnostics) if asked else ())
    resolved, _ = bind(plan, model.tree, model.sizes)
    parts = StageParts(resolved.pp_blocks, resolved.pp_first, resolved.pp_last, resolved.pp_carried)
    facts = cut_facts(recorded_models, parts)
    declared = frozenset((*resolved.pp_first, *resolved.pp_last))
    resolved = replace(
        resolved,
        pp_first=facts.parts.first,
        pp_last=facts.parts.last,
        pp_handed=facts.handed,
        pp_results=facts.results or 0,
        pp_written=facts.written,
    )
    findings = stage_findings(resolved, facts, severity, declared)
    return StagedPlan(resolved, facts, tuple(replace(d, modules=model.names_in_model(d.modules)) for d in findings))


def with_stages(
    resolved: ResolvedPlan, staged: StagedPlan, severity: Severity = Severity.ERROR
) -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    """A plan bound to a model, with the stages of all its parts as its reduced model shows them; and the parts whose
    stage is unknown because the reduced model has none like them."""
    if staged.facts is None or staged.resolved is None:  # nothing ran: a part that the plan does not name has no stage
        return resolved, _unknown(resolved, tuple(_outside(resolved)), severity) if severity is Severity.ERROR else ()
    if not staged.facts.proven:
        return resolved, ()
    tree, there = resolved.tree, staged.resolved.tree
    stage = {there.pattern(name): 0 for name in staged.facts.parts.first}
    stage |= {there.pattern(name): 1 for name in staged.facts.parts.last}
    ends: tuple[dict[str, None], dict[str, None]] = (dict.fromkeys(resolved.pp_first), dict.fromkeys(resolved.pp_last))
    unknown = []
    for name in _outside(resolved):
        root = stage_root(tree, name, resolved.pp_blocks)
        places = map(tree.pattern, (root, name, *ancestors(name)))
        at = next((stage[place] for place in places if place in stage), None)
        if at is None:
            unknown.append(name)
        else:
            ends[at][root] = None
    handed: dict[str, HandedOn] = {}
    for one in staged.facts.handed:
        known = handed.setdefault(there.pattern(one.module), one)
        positions = tuple(sorted({*known.positions, *one.positions}))
        handed[there.pattern(one.module)] = replace(one, positions=positions)
    written = {there.pattern(name) for name in staged.facts.written}
    first = outermost(ends[0])
    found = replace(
        resolved,
        pp_first=first,
        pp_last=outermost(ends[1]),
        pp_handed=tuple(
            replace(given, module=name)
            for name in resolved.pp_carried
            if (given := handed.get(tree.pattern(name))) is not None
        ),
        pp_results=staged.facts.results or 0,
        pp_written=tuple(name for name in first if tree.pattern(name) in written),
    )
    return found, _unknown(resolved, tuple(unknown), severity)


def _outside(resolved: ResolvedPlan) -> Iterator[str]:
    """The parameters that the plan puts in no stage."""
    named = (*resolved.pp_blocks, *resolved.pp_first, *resolved.pp_last)
    prefixes = tuple(full_name(one, "") for one in named)
    return (name for name in resolved.tree.parameters if not full_name(name, "").startswith(prefixes))


def _unknown(resolved: ResolvedPlan, names: tuple[str, ...], severity: Severity) -> tuple[Diagnostic, ...]:
    return (unread(names, field_label(resolved.pipeline_parallel, "layers"), severity),) if names else ()
