"""The built-in plan of one model type, cut into pipeline stages."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.bind import bind
from shardplan.compiler.check import check
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.stage_plan import staged_plan, with_stages
from shardplan.compiler.user_inputs import Model
from shardplan.compiler.variants import wanted_variants
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.model import FoundModel, find_any
from shardplan.proof.prove_stages import pipeline_findings, prove_pipeline, reduced_cut
from shardplan.proof.stage import Question
from tests.model_settings import without_dropout

from .entry import Entry
from .experts import config_of

STAGES, TP = 3, 2


def with_pipeline(before: Entry) -> Entry:
    """The entry of a type with what was found out about its plan's pipeline stages."""
    torch.set_num_threads(1)
    if before.plan is None:
        return replace(before, pipeline="")
    try:
        found = find_any(without_dropout(config_of(before.name)))
    except PlanError:  # why is in the entry
        return replace(before, pipeline="")
    return replace(before, pipeline=judged(found))


def judged(found: FoundModel) -> str:
    """ "one tensor", "one tensor and a tie", "carries ..." where the plan's cut is proven, with and without its sequence parallelism,
    "none" without a section, else what is wrong.

    The proof runs every block of the reduced model as a stage of its own.
    """
    plan = auto_plan(found.tree).plan
    assert plan is not None
    sizes = MeshSizes(tp=1, pp=2)
    resolved, about = bind(plan, found.tree, sizes)
    if resolved.pipeline_parallel is None:
        return "none"
    wrong = [d for d in (*about, *check(resolved)) if d.is_error]
    if wrong:
        return _said(wrong[0])
    reduced = ModelLayouts(found, TP, pp=STAGES)
    staged = staged_plan(plan, reduced)
    _, unknown = with_stages(resolved, staged)
    if (wrong := [d for d in (*staged.findings, *unknown) if d.is_error]) or not staged.ok:
        return _said(wrong[0])
    assert staged.resolved is not None
    cut = reduced_cut(staged, len(staged.resolved.pp_blocks))
    try:
        wanted = wanted_variants(plan, None, reduced.sizes)
        proof = prove_pipeline(Question(reduced, Model(found.config), plan), cut, wanted)
    except PlanError as error:
        return _said(error.diagnostics[0])
    if (differs := pipeline_findings(proof, None)) or not proof.ok:
        return _said(differs[0]) if differs else "nothing could be compared"
    carried = dict.fromkeys(staged.resolved.tree.pattern(name).rpartition(".")[2] for name in cut.carried)
    more = [*(["a tie"] if cut.ties else []), *(f"`{name}`" for name in carried)]
    return " and ".join(["one tensor", *([", ".join(more)] if more else [])])


def proven(text: str) -> bool:
    """Whether what is said of a type is that its stages are proven."""
    return text.startswith("one tensor")


def _said(d: Diagnostic) -> str:
    return " ".join(f"{d.code}: {d.message}".split())
