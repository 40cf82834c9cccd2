"""The proof of a plan's pipeline stages on the reduced model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.check.field_places import field_label
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.model import unproven
from shardplan.compiler.layout.stage_plan import StagedPlan, staged_plan
from shardplan.compiler.lower import Program
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.core.diagnostics import Code, Diagnostic, Label, PlanError, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, Overlays
from shardplan.core.proof_meshes import MOST
from shardplan.core.report import Comparison, NumericProof, PipelineProof
from shardplan.core.schedules import SCHEDULES, Schedule
from shardplan.core.stages import PipelineCut
from shardplan.model.model_findings import reason
from shardplan.runtime.apply.agreement import on_first_rank
from shardplan.styles.backends import BACKENDS
from shardplan.torchlib.modes import reduced_runs

from .compare import worst_of
from .failure import cause_of
from .pipelined import NO_ROWS, Scheduled, ScheduledCase, kinds_with_rows
from .proof_findings import unreached
from .prove import EAGER, compile_for, settle, steps_of
from .reach import unreached_parameters
from .simulate import with_data_parallel
from .stage import Question
from .threads import OnRanks, rank_threads

STAGES = Code("SP436")

MOST_ROWS = 5  # of what differs, in a finding's notes
MOST_STAGES = 3  # a first, a middle and a last one, where ranks have one each
ONE_EACH = SCHEDULES["1f1b"]  # a stage on each rank


@reduced_runs()
def with_pipeline(
    proof: NumericProof,
    asked: Question,
    staged: StagedPlan,
    wanted: Sequence[Overlays],
    schedule: Schedule | None = None,
) -> tuple[NumericProof, tuple[Diagnostic, ...]]:
    """A proof with that of the plan's pipeline stages, and what that finds.

    Args:
        proof: of the same plan.
        asked: its reduced model is for a mesh with several pp ranks.
        staged: without errors.
        wanted: which of the plan's variants.
        schedule: that the user wants, where that is known. Where the reduced model has no block for each of its stages, ranks have one each.
    """
    schedule = schedule or ONE_EACH
    start = time.monotonic()
    reduced, ranks = asked.reduced, min(asked.reduced.pp, MOST_STAGES)
    if schedule.multiple:
        ranks = 2
        reduced, staged = _with_blocks(asked, staged, ranks * schedule.stages_per_rank)
    assert staged.resolved is not None
    if len(staged.resolved.pp_blocks) < ranks * schedule.stages_per_rank:
        schedule = ONE_EACH
    cut = reduced_cut(staged, ranks * schedule.stages_per_rank)
    asked = replace(asked, reduced=reduced)
    try:
        made = prove_pipeline(asked, cut, wanted, schedule)
    except PlanError as error:
        about = [unproven(d, asked.allow_unproven) if d.code == NO_ROWS else d for d in error.diagnostics]
        return replace(proof, pipeline=PipelineProof((), (), ())), tuple(about)
    wrong = pipeline_findings(made, field_label(staged.resolved.pipeline_parallel, "layers"))
    proof = replace(proof, pipeline=made, seconds=proof.seconds + time.monotonic() - start)
    return proof, (*wrong, *_unreached(asked, wanted))


def _unreached(asked: Question, wanted: Iterable[Overlays]) -> tuple[Diagnostic, ...]:
    """What the plan touches and only inputs reach that micro-batches cannot be made of."""
    reduced, kinds = asked.reduced, kinds_with_rows(asked.reduced)
    if kinds == reduced.reduced_model.kinds:
        return ()
    runs = [steps_of(reduced.reduced_model, kind, torch.float32, plain=True)[1] for kind in kinds]
    missing = tuple(unreached_parameters(reduced, runs, kinds))
    found = (unreached(missing, one, reduced, asked.allow_unproven) for one in _programs(asked, wanted))
    return tuple(dict.fromkeys(d for about in found for d in about))


def _programs(asked: Question, wanted: Iterable[Overlays]) -> list[Program]:
    compiled = compile_for(asked.reduced, asked.plan, asked.reduced.sizes, wanted)
    return [program_of(compiled, on, logits=asked.logits, sections=EAGER) for on in wanted]


def _with_blocks(asked: Question, staged: StagedPlan, count: int) -> tuple[ModelLayouts, StagedPlan]:
    """The reduced model with so many blocks, as far as the model has them."""
    reduced = asked.reduced
    if reduced.blocks >= count:
        return reduced, staged
    larger = ModelLayouts(reduced.found, reduced.tp, reduced.ep, reduced.heads_times, count, count)
    return larger, staged_plan(asked.plan, larger)


@reduced_runs()
def prove_stages_on_first_rank(
    asked: Question, staged: StagedPlan, on: Overlays, schedule: Schedule, mesh: DeviceMesh
) -> tuple[Diagnostic, ...]:
    """What the proof of a plan's pipeline stages finds. The first rank of the mesh proves, and sends the result to the others."""

    def answer() -> tuple[Diagnostic, ...]:
        return with_pipeline(NumericProof(MeshSizes(pp=2), ()), asked, staged, (on,), schedule)[1]

    return on_first_rank(answer, mesh)


def reduced_cut(staged: StagedPlan, stages: int) -> PipelineCut:
    """The cut of the reduced model that stands for one into so many stages: as many, as far as it has blocks."""
    assert staged.resolved is not None and staged.ok, staged.findings
    blocks = len(staged.resolved.pp_blocks)
    return pipeline_cut(staged.resolved, even_sizes(blocks, min(stages, blocks)))


@torch.random.fork_rng(devices=[])
def prove_pipeline(
    asked: Question, cut: PipelineCut, wanted: Iterable[Overlays] = (NO_OVERLAYS,), schedule: Schedule = ONE_EACH
) -> PipelineProof:
    """Run the stages of the reduced model on simulated ranks of pp, tp and two data-parallel ones where some are asked for, a
    micro-batch for each stage, and compare them with the whole model.

    Raises:
        PlanError: SP436: a stage raises, but the whole model does not; SP438: no inputs that micro-batches can be made of.
    """
    reduced = asked.reduced
    sizes = _with_replicas(replace(reduced.sizes, pp=cut.stages // schedule.stages_per_rank), asked.sizes)
    scheduled = Scheduled(cut, schedule, cut.stages, kinds_with_rows(reduced))
    programs = [with_data_parallel(program) for program in _programs(asked, wanted)]
    sections = [program.resolved.data_parallel for program in programs]
    if not all(section is None or BACKENDS[section.backend].fully_shard for section in sections):
        sizes = replace(sizes, dp_shard=reduced.sizes.dp_shard)

    def run(on_ranks: OnRanks, dtype: torch.dtype) -> tuple[Comparison, ...]:
        found: list[Comparison] = []
        for program in programs:
            for kind in scheduled.kinds:
                inputs = partial(reduced.reduced_model.inputs, kind=kind)
                case = ScheduledCase(reduced.reduced_model.build, inputs, program, sizes, scheduled, dtype)
                found += case.simulated(on_ranks)
        return worst_of(found)

    try:
        with rank_threads(sizes.world_size) as on_ranks:
            rows = settle(partial(run, on_ranks))
    except Exception as error:  # whatever the modelling code raises
        raise PlanError((_raises(error),)) from error
    return PipelineProof(cut.sizes, cut.carried, rows)


def _with_replicas(sizes: MeshSizes, asked: MeshSizes) -> MeshSizes:
    """With two data-parallel ranks, where some are asked for and there is room for them."""
    if asked.dp_shard * asked.dp_replicate == 1 or sizes.dp_shard > 1 or 2 * sizes.world_size > MOST:
        return sizes
    return replace(sizes, dp_shard=2)


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
            message=f"a step of the reduced model in {len(proof.sizes)} pipeline stages differs from the whole one's in "
            f"{len(wrong)} tensors",
            primary=label,
            notes=(*shown, *more),
            help="use a mesh with pp 1",
        ),
    )
