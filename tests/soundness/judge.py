"""The two judges of an edited plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardplan.compiler.layout import LayoutReport, ModelLayouts, RecordedModel, check_layout
from shardplan.compiler.layout.layout_check import Search
from shardplan.compiler.layout.solver.block_rules import BlockRules
from shardplan.compiler.layout.whole_experts import token_findings
from shardplan.compiler.lower import Program, lower
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.variants import any_error, bind_variants, check_variants, wanted_variants
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan, overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan
from shardplan.model.build_tree import tree_of
from shardplan.model.reduced.reduced_model import make_reduced_model
from shardplan.proof.simulate import Run, simulate
from shardplan.proof.steps import STEPS, Steps, cast, reference_steps
from shardplan.proof.threads import rank_threads
from shardplan.styles import STYLES
from tests.model_settings import find_once


@dataclass
class Subject:
    """A small model with what both judges need of it.

    Args:
        name: the architecture.
        tp: the size of the axis.
        models: by dtype.
        tree: its picture.
        recorded_models: by kind of input ("text", "image", "video"), its unsharded recorded run.
        batches: by kind, what its training steps are called with.
        steps: by kind and dtype, its unsharded training steps.
        unseen: why images that it takes are not among its inputs.
        ep: the number of ranks that experts are distributed over: 1, or tp.
    """

    name: str
    tp: int
    models: dict[torch.dtype, nn.Module]
    tree: ModuleTree
    recorded_models: dict[str, RecordedModel]
    batches: dict[str, list[dict[str, Any]]]
    steps: dict[str, dict[torch.dtype, Steps]]
    unseen: str = ""
    ep: int = 1

    def recorded_for(self, plan: ResolvedPlan) -> tuple[RecordedModel, ...]:
        """The recorded runs for a plan: with the experts that it distributes as one operation each."""
        experts = frozenset(name for name, a in plan.modules.items() if STYLES[a.rule.style].experts is not None)
        if not experts:
            return tuple(self.recorded_models.values())
        return tuple(RecordedModel(one.model, one.inputs, one.tree, experts) for one in self.recorded_models.values())

    @property
    def recorded(self) -> RecordedModel:
        """Its run on text."""
        return next(iter(self.recorded_models.values()))


class _Steps(dict[torch.dtype, Steps]):
    """The unsharded training steps of a kind of input, each dtype's when it is first asked for."""

    def __init__(self, models: Mapping[torch.dtype, nn.Module], batches: Sequence[dict[str, Any]]):
        super().__init__()
        self._of = (models, batches)

    def __missing__(self, dtype: torch.dtype) -> Steps:
        models, batches = self._of
        self[dtype] = reference_steps(copy.deepcopy(models[dtype]), [cast(batch, dtype) for batch in batches])
        return self[dtype]


def fitting(name: str, tp: int, plan: PlanFile) -> Subject:
    """The reduced model of an architecture, with as many heads as a plan needs."""
    small, sizes = subject(name, tp), MeshSizes(tp=tp)
    variants = wanted_variants(plan, None, sizes)
    bound = check_variants(bind_variants(plan, small.tree, sizes, variants))
    layouts = ModelLayouts(find_once(name), tp)
    if any(any_error(bound.findings[on]) for on in variants) and layouts.fit(plan, variants):
        return subject(name, tp, heads_times=layouts.heads_times)
    return small


def subject(name: str, tp: int, tied: bool | None = None, ep: int = 1, heads_times: int = 1) -> Subject:
    """The reduced model of an architecture; experts one by one, as grouped multiplications want float32 and even sizes."""
    reduced_model = make_reduced_model(
        find_once(name), tp=tp, ep=ep, tied=tied, experts_implementation="eager", heads_times=heads_times
    )
    model, exact = reduced_model.build(), reduced_model.build()
    tree = tree_of(model)
    models = {torch.float32: model, torch.float64: exact.to(torch.float64)}
    recorded_models, batches, steps = {}, {}, {}
    for kind in reduced_model.kinds:
        batches[kind] = [reduced_model.inputs(seed=seed, kind=kind) for seed in range(STEPS)]
        if "output_router_logits" in vars(model.config):
            for batch in batches[kind]:
                batch["output_router_logits"] = True  # the auxiliary loss reads what the experts' block has
        steps[kind] = _Steps(models, batches[kind])
        steps[kind][torch.float32]
        recorded_models[kind] = RecordedModel(model, batches[kind][0], tree)
    return Subject(name, tp, models, tree, recorded_models, batches, steps, reduced_model.unseen, ep)


@dataclass(frozen=True)
class Verdict:
    """What the judges say.

    Args:
        structure: the errors that binding and the structural checks have.
        layout: the report of the layout check, which runs where there are none.
        right: what the numeric proof says.
        silent: wrong, but with the right loss.
        worst: the tensor that differs most, or the exception.
        resolved: the plan of the program that was judged: after every pass.
        fixed: the changes that the report proposes leave nothing to find; None where none was looked for.
    """

    structure: tuple[Diagnostic, ...]
    layout: LayoutReport | None
    right: bool
    silent: bool
    worst: str
    resolved: ResolvedPlan
    fixed: bool | None = None

    @property
    def valid(self) -> bool:
        return not self.structure and self.layout is not None and not self.layout.diagnostics


def judge(subject: Subject, plan: PlanFile, *, sequence_parallel: bool, help: bool = True) -> Verdict:
    """Let both judges see a plan."""
    sizes = MeshSizes(tp=subject.tp, ep=subject.ep)
    on, base = overlays_of(sequence_parallel, sizes), overlays_of(False, sizes)
    variants = check_variants(bind_variants(plan, subject.tree, sizes, dict.fromkeys((on, base))))
    structure = tuple(d for d in variants.findings[on] if d.is_error)
    layout, fixed = None, None
    if not structure:
        layout = _layouts(subject, variants.resolved[on], help=help)
        if help and layout.diagnostics:
            fixed = _mends(subject, variants.resolved[on], layout)
        reports = {on: layout}
        if on != base and not any_error(variants.findings[base]):
            reports[base] = _layouts(subject, variants.resolved[base], help=False)
        variants = replace(variants, layouts=reports)
    # The very program that `apply_plan` runs: compiled in the same way, after every pass.
    program = program_of(variants, on)
    return Verdict(structure, layout, *_numbers_of_program(subject, program), program.resolved, fixed)


def _mends(subject: Subject, resolved: ResolvedPlan, report: LayoutReport) -> bool:
    """Whether the proposed changes, all together, give a plan without findings."""
    if None in report.repairs:
        return False
    for repair in report.repairs:
        resolved = repair.apply(resolved)
    return _layouts(subject, resolved, help=False).ok


def _layouts(subject: Subject, resolved: ResolvedPlan, *, help: bool) -> LayoutReport:
    recorded_models = subject.recorded_for(resolved)
    search = Search(solved=BlockRules(recorded_models, subject.tp, subject.tree).repairs)
    report = check_layout(resolved, recorded_models, help=help, search=search)
    if not report.ok or subject.ep == 1:
        return report
    found = token_findings(resolved, recorded_models, subject.ep)
    return replace(report, diagnostics=found, repairs=(None,) * len(found))


def _numbers(subject: Subject, resolved: ResolvedPlan) -> tuple[bool, bool, str]:
    """As `_numbers_of_program`, of a plan as it is."""
    return _numbers_of_program(subject, lower(resolved))


def _numbers_of_program(subject: Subject, program: Program) -> tuple[bool, bool, str]:
    """(right, wrong with the right loss, what differs most): the first kind of input with which it is wrong."""
    if not any(p.dim is not None for m in program.modules.values() for p in m.parameters):
        return False, True, "nothing is split"
    for kind in subject.recorded_models:
        said = _numbers_of(subject, program, kind)
        if not said[0]:
            return said
    return True, False, ""


def _numbers_of(subject: Subject, program: Program, kind: str) -> tuple[bool, bool, str]:
    for dtype in (torch.float32, torch.float64):
        build = partial(copy.deepcopy, subject.models[dtype])
        try:
            batches = [cast(batch, dtype) for batch in subject.batches[kind]]
            with rank_threads(program.resolved.sizes.world_size) as on_ranks:
                rows = simulate(Run(build, [batches], [subject.steps[kind][dtype]]), program, on_ranks)
        except Exception as error:
            return False, False, f"{type(error).__name__}: {str(error)[:160]}"
        wrong = [row for row in rows if row.verdict == "differs"]
        if not wrong:
            return True, False, ""
    worst = max(wrong, key=lambda row: row.error)
    silent = not any(row.kind == "output" for row in wrong)
    return False, silent, f"{worst.name} {worst.error:.1e}"


def parse(document: dict[str, Any]) -> PlanFile | None:
    """The plan of an edited document; None where it is not even well formed."""
    parsed = parse_plan(document, name="edited")
    return None if parsed.plan is None or any(d.is_error for d in parsed.diagnostics) else parsed.plan
