"""The proof of a plan's pipeline stages on the reduced model."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.check.field_places import field_label
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.stage_plan import StagedPlan
from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.core.diagnostics import Code, Diagnostic, Label, PlanError, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.report import Comparison, NumericProof, PipelineProof
from shardplan.core.stages import PipelineCut
from shardplan.model.model_findings import reason
from shardplan.model.reduced import ReducedModel
from shardplan.model.reduced.precision import in_dtype
from shardplan.runtime.apply.agreement import on_first_rank
from shardplan.torchlib.modes import reduced_runs

from .compare import worst_of
from .failure import cause_of
from .prove import settle, steps_of
from .staged import staged_rows

STAGES = Code("SP436")

MOST_ROWS = 5  # of what differs, in a finding's notes


def with_pipeline(
    proof: NumericProof, reduced: ModelLayouts, staged: StagedPlan
) -> tuple[NumericProof, tuple[Diagnostic, ...]]:
    """A proof with that of the plan's pipeline stages, and what that finds.

    Args:
        proof: of the same plan.
        reduced: for a mesh with several pp ranks.
        staged: without errors.
    """
    start = time.monotonic()
    try:
        made = prove_pipeline(reduced, reduced_cut(staged, reduced.pp))
    except PlanError as error:
        return replace(proof, pipeline=PipelineProof((), (), ())), error.diagnostics
    assert staged.resolved is not None
    about = pipeline_findings(made, field_label(staged.resolved.pipeline_parallel, "layers"))
    return replace(proof, pipeline=made, seconds=proof.seconds + time.monotonic() - start), about


@reduced_runs()
def prove_pipeline_on_first_rank(
    reduced: ModelLayouts, staged: StagedPlan, pp: int, mesh: DeviceMesh
) -> tuple[Diagnostic, ...]:
    """What the proof of a plan's pipeline stages finds. The first rank of the mesh proves, and sends the result to the others."""

    def answer() -> tuple[Diagnostic, ...]:
        return with_pipeline(NumericProof(MeshSizes(pp=pp), ()), reduced, staged)[1]

    return on_first_rank(answer, mesh)


def reduced_cut(staged: StagedPlan, pp: int) -> PipelineCut:
    """The cut of the reduced model that stands for one into `pp` stages: as many, as far as it has blocks."""
    assert staged.resolved is not None and staged.ok, staged.findings
    blocks = len(staged.resolved.pp_blocks)
    return pipeline_cut(staged.resolved, even_sizes(blocks, min(pp, blocks)))


@reduced_runs()
@torch.random.fork_rng(devices=[])
def prove_pipeline(reduced: ModelLayouts, cut: PipelineCut) -> PipelineProof:
    """Run the stages of the reduced model one after the other in this process, forward and backward, and compare them with the
    whole model.

    Raises:
        PlanError: SP436: a stage raises, but the whole model does not.
    """
    model = reduced.reduced_model
    run = partial(_rows, model, cut)
    return PipelineProof(cut.sizes, cut.carried, settle(run))


def _rows(model: ReducedModel, cut: PipelineCut, dtype: torch.dtype) -> tuple[Comparison, ...]:
    found: list[Comparison] = []
    for kind in model.kinds:
        batches, steps = steps_of(model, kind, dtype)
        try:
            found += staged_rows(partial(_built, model, dtype), batches, cut, steps)
        except Exception as error:  # whatever the modelling code raises
            raise PlanError((_raises(error),)) from error
    return worst_of(found)


def _built(model: ReducedModel, dtype: torch.dtype) -> nn.Module:
    return in_dtype(model.build(), dtype)


def _raises(error: Exception) -> Diagnostic:
    cause, where = cause_of(error)
    return Diagnostic(
        code=STAGES,
        severity=Severity.ERROR,
        message="the reduced model raises when it is cut into pipeline stages",
        notes=(reason(cause), *where),
        help="use a mesh with pp 1",
    )


def pipeline_findings(proof: PipelineProof, label: Label | None) -> tuple[Diagnostic, ...]:
    """SP436 where something differs.

    Args:
        label: the section of the plan.
    """
    wrong = [row for row in proof.rows if row.verdict == "differs"]
    if not wrong:
        return ()
    shown = [f"{row.kind} {row.name}: {row.error:.1e} of its largest value ({row.where})" for row in wrong[:MOST_ROWS]]
    more = [f"and {len(wrong) - len(shown)} more"] if len(wrong) > len(shown) else []
    return (
        Diagnostic(
            code=STAGES,
            severity=Severity.ERROR,
            message=f"two steps of the reduced model in {len(proof.sizes)} pipeline stages differ from the whole one's in "
            f"{len(wrong)} tensors",
            primary=label,
            notes=(*shown, *more),
            help="use a mesh with pp 1",
        ),
    )
