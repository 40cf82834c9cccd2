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
        benches: by kind of input ("text", "image", "video"), its unsharded recorded run.
        steps: by kind and dtype, its unsharded training step.
        unseen: why images that it takes are not among its inputs.
    """

    name: str
    tp: int
    models: dict[torch.dtype, nn.Module]
    tree: ModuleTree
    benches: dict[str, Workbench]
    steps: dict[str, dict[torch.dtype, Step]]
    unseen: str = ""

    @property
    def bench(self) -> Workbench:
        """Its run on text."""
        return next(iter(self.benches.values()))


def subject(name: str, tp: int, tied: bool | None = None) -> Subject:
    """The small model of an architecture; experts one by one, as grouped multiplications want float32 and even sizes."""
    twin = make_twin(find(name), tp=tp, tied=tied, experts_implementation="eager")
    model, exact = twin.build(), twin.build()
    tree = tree_of(model)
    models = {torch.float32: model, torch.float64: exact.to(torch.float64)}
    benches, steps = {}, {}
    for kind in twin.kinds:
        inputs = twin.inputs(kind=kind)
        if "output_router_logits" in vars(model.config):
            inputs["output_router_logits"] = True  # the auxiliary loss reads what the experts' block has
        steps[kind] = {dtype: reference_step(copy.deepcopy(one), cast(inputs, dtype)) for dtype, one in models.items()}
        benches[kind] = Workbench(model, inputs, tree)
    return Subject(name, tp, models, tree, benches, steps, twin.unseen)


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
        layout = check_layout(resolved, tuple(subject.benches.values()), help=help)
        if help and layout.diagnostics:
            mended = _mends(subject, resolved, layout)
        resolved = layout.onto(resolved)
    return Verdict(structure, layout, *_numbers(subject, resolved), resolved, mended)


def _mends(subject: Subject, resolved: ResolvedPlan, report: LayoutReport) -> bool:
    """Whether the proposed changes, all together, give a plan without findings."""
    if None in report.repairs:
        return False
    for repair in report.repairs:
        resolved = repair.apply(resolved)
    return check_layout(resolved, tuple(subject.benches.values()), help=False).ok


def _numbers(subject: Subject, resolved: ResolvedPlan) -> tuple[bool, bool, str]:
    """(right, wrong with the right loss, what differs most): the first kind of input with which it is wrong."""
    if not any(p.dim is not None for m in lower(resolved).modules.values() for p in m.parameters):
        return False, True, "nothing is split"
    for kind in subject.benches:
        said = _numbers_of(subject, resolved, kind)
        if not said[0]:
            return said
    return True, False, ""


def _numbers_of(subject: Subject, resolved: ResolvedPlan, kind: str) -> tuple[bool, bool, str]:
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(subject.models[dtype])
        try:
            inputs = cast(subject.benches[kind].inputs, dtype)
            rows = simulate(model, inputs, lower(resolved), subject.steps[kind][dtype])
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
