"""The two judges of an edited plan."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardplan.bind import bind
from shardplan.check import check
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.layout import LayoutReport, Workbench, check_layout
from shardplan.lower import lower
from shardplan.models.tree import tree_of
from shardplan.optimise import optimise
from shardplan.parse import parse_plan
from shardplan.proof.simulate import simulate
from shardplan.proof.steps import Step, cast, reference_step
from shardplan.twin import make_twin
from tests.model_settings import find


@dataclass
class Subject:
    """A small model with what both judges need of it.

    Args:
        name: the architecture.
        tp: the size of the axis.
        models: by dtype.
        tree: its picture.
        bench: its unsharded recorded run.
        inputs: of its forward.
        steps: its unsharded training step, by dtype.
    """

    name: str
    tp: int
    models: dict[torch.dtype, nn.Module]
    tree: ModuleTree
    bench: Workbench
    inputs: dict[str, Any]
    steps: dict[torch.dtype, Step]


def subject(name: str, tp: int, tied: bool | None = None) -> Subject:
    """The small model of an architecture; experts one by one, as grouped multiplications want float32 and even sizes."""
    twin = make_twin(find(name), tp=tp, tied=tied, experts_implementation="eager")
    model, inputs, exact = twin.build(), twin.inputs(), twin.build()
    if "output_router_logits" in vars(model.config):
        inputs["output_router_logits"] = True  # the auxiliary loss reads what the experts' block has
    tree = tree_of(model)
    models = {torch.float32: model, torch.float64: exact.to(torch.float64)}
    steps = {dtype: reference_step(copy.deepcopy(one), cast(inputs, dtype)) for dtype, one in models.items()}
    return Subject(name, tp, models, tree, Workbench(model, inputs, tree), inputs, steps)


@dataclass(frozen=True)
class Verdict:
    """What the judges say.

    Args:
        structure: the errors that binding and the structural checks have.
        layout: the report of the layout check, which runs where there are none.
        right: what the numeric proof says.
        silent: wrong, but with the right loss.
        worst: the tensor that differs most, or the exception.
        resolved: the plan as it is lowered.
        mended: the changes that the report proposes leave nothing to find; None where none was looked for.
    """

    structure: tuple[Diagnostic, ...]
    layout: LayoutReport | None
    right: bool
    silent: bool
    worst: str
    resolved: ResolvedPlan
    mended: bool | None = None

    @property
    def valid(self) -> bool:
        return not self.structure and self.layout is not None and not self.layout.diagnostics


def judge(subject: Subject, plan: PlanFile, *, sequence_parallel: bool, help: bool = True) -> Verdict:
    """Let both judges see a plan."""
    sizes = MeshSizes(tp=subject.tp)
    resolved, about = bind(plan, subject.tree, sizes, sequence_parallel=sequence_parallel)
    structure = tuple(d for d in (*about, *check(resolved, seq_len=None)) if d.is_error)
    layout, mended = None, None
    if not structure:
        layout = check_layout(resolved, subject.bench, help=help)
        if help and layout.diagnostics:
            mended = _mends(subject, resolved, layout)
        resolved = replace(resolved, arrivals=layout.arrivals, elsewhere=layout.elsewhere)
        if layout.ok:
            resolved = optimise(resolved, layout)
    return Verdict(structure, layout, *_numbers(subject, resolved), resolved, mended)


def _mends(subject: Subject, resolved: ResolvedPlan, report: LayoutReport) -> bool:
    """Whether the proposed changes, all together, give a plan without findings."""
    if None in report.repairs:
        return False
    for repair in report.repairs:
        resolved = repair.apply(resolved)
    return check_layout(resolved, subject.bench, help=False).ok


def _numbers(subject: Subject, resolved: ResolvedPlan) -> tuple[bool, bool, str]:
    if not any(p.dim is not None for m in lower(resolved).modules.values() for p in m.parameters):
        return False, True, "nothing is split"
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(subject.models[dtype])
        try:
            rows = simulate(model, cast(subject.inputs, dtype), lower(resolved), subject.steps[dtype])
        except Exception as error:
            return False, False, f"{type(error).__name__}: {str(error)[:160]}"
        wrong = [row for row in rows if row.verdict == "differs"]
        if not wrong:
            return True, False, ""
    worst = max(wrong, key=lambda row: row.error)
    silent = not any(row.kind in ("loss", "logits") for row in wrong)
    return False, silent, f"{worst.name} {worst.error:.1e}"


def parse(document: dict[str, Any]) -> PlanFile | None:
    """The plan of an edited document; None where it is not even well formed."""
    parsed = parse_plan(document, name="edited")
    return None if parsed.plan is None or any(d.is_error for d in parsed.diagnostics) else parsed.plan
