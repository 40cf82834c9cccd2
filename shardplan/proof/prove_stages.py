"""The proof of a plan's pipeline stages on the reduced model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.check.check_words import field_label
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.model import unproven
from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.layout.stage_plan import StagedPlan, staged_plan
from shardplan.compiler.lower import Program
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.core.diagnostics import Code, Diagnostic, Label, PlanError, Severity
from shardplan.core.first_few import first_few
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.plan import NO_OVERLAYS, Overlays, without_sequence
from shardplan.core.proof_meshes import stage_meshes
from shardplan.core.report import Comparison, NumericProof, PipelineProof
from shardplan.core.schedules import SCHEDULES, Schedule
from shardplan.core.stages import PipelineCut
from shardplan.model.model_findings import reason
from shardplan.model.reduced.precision import in_dtype, with_half
from shardplan.model.reduced.reduced_model import ReducedModel
from shardplan.model.reduced.weights import writes_to
from shardplan.runtime.apply.agreement import on_first_rank
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.pipeline.refused_plans import for_stages
from shardplan.torchlib.gathering import without_advice
from shardplan.torchlib.modes import reduced_runs

from .compare import worst_of
from .failure import cause_of
from .other_sides import only_with
from .pipelined import AXES, NO_ROWS, Scheduled, ScheduledCase, kinds_with_rows, one_step
from .proof_batches import MicroBatches
from .proof_findings import unreached
from .prove import EAGER, compile_for, settle, simulated_sizes, steps_of
from .rank import Left, mesh_of, whole
from .reach import unreached_parameters
from .remembered_proofs import ModelNow, digest_of, known, remember
from .section_dtype import DtypeTrial, LowerDtypes, Unsharded, few_batches
from .simulate import common_to_ranks, copy_of, with_data_parallel
from .stage import EARLIER, NOW, Question
from .steps import Steps
from .threads import OnRanks, rank_threads
from .wrong_forms import amount_of

STAGES = Code("SP436")

ONE_EACH = SCHEDULES["1f1b"]  # one stage on each rank


@reduced_runs()
def with_pipeline(
    proof: NumericProof,
    asked: Question,
    staged: StagedPlan,
    wanted: Sequence[Overlays],
    schedule: Schedule | None = None,
) -> tuple[NumericProof, tuple[Diagnostic, ...]]:
    """A proof, extended by the proof of the plan's pipeline stages, and the findings of the latter.

    Args:
        proof: the proof of the same plan.
        asked: the question; its reduced model is for a mesh with several pp ranks.
        staged: the plan's stages, without errors.
        wanted: the plan's variants to prove.
        schedule: the user's, if known. If the reduced model has too few blocks for its stages, ranks have one stage each.
    """
    schedule = schedule or ONE_EACH
    start = time.monotonic()
    label = field_label(staged.resolved.pipeline_parallel, "layers") if staged.resolved is not None else None
    made: list[PipelineProof] = []
    try:
        meshes = _meshes(asked, staged, multiple=schedule.multiple)
        for mesh in meshes:
            made.append(_on_mesh(asked, staged, mesh, wanted, schedule))
    except PlanError as error:
        about = [unproven(d, asked.allow_unproven) if d.code == NO_ROWS else d for d in error.diagnostics]
        return replace(proof, pipeline=PipelineProof((), (), ())), tuple(about)
    rows = worst_of(row for one in made for row in one.rows)
    whole = replace(made[0], rows=rows)
    wrong = pipeline_findings(whole, label)
    if not wrong and (lower := asked.lower_dtypes(wanted[0])) is not None:
        wrong = _in_lower(asked, staged, meshes[0], wanted, schedule, lower)
        proof = replace(proof, once_in=lower.shown)
    told: tuple[Diagnostic, ...] = ()
    if not wrong and asked.reduced.found.own_code:
        told = () if proof.variants else asked.other_sides.warning()
        found = (_on_other_side(asked, staged, meshes, wanted, schedule, *side) for side in asked.other_sides.branches)
        wrong = next((one for one in found if one), ())
    proof = replace(proof, pipeline=whole, seconds=proof.seconds + time.monotonic() - start)
    return proof, (*wrong, *told, *_unreached(asked, wanted))


def _on_other_side(
    asked: Question,
    staged: StagedPlan,
    meshes: Iterable[MeshSizes],
    wanted: Sequence[Overlays],
    schedule: Schedule,
    branches: Callable[[ReducedModel], ReducedModel],
    lines: Iterable[str],
) -> tuple[Diagnostic, ...]:
    """The errors of the stages where the user's own code takes other branches.

    Args:
        branches, lines: as of `OtherSides.branches`.
    """
    reduced = asked.reduced.with_branches(branches).of()
    found = staged_plan(asked.plan, reduced).findings
    label = field_label(staged.resolved.pipeline_parallel, "layers") if staged.resolved is not None else None
    try:
        for mesh in meshes if not any(one.is_error for one in found) else ():
            proof = _on_mesh(replace(asked, reduced=reduced), staged, mesh, wanted, schedule)
            found = (*found, *pipeline_findings(proof, label))
    except PlanError as error:
        found = error.diagnostics
    return only_with(lines, found)


@torch.random.fork_rng(devices=[])
def _in_lower(
    asked: Question,
    staged: StagedPlan,
    mesh: MeshSizes,
    wanted: Sequence[Overlays],
    schedule: Schedule,
    lower: LowerDtypes,
) -> tuple[Diagnostic, ...]:
    """SP424 for the stages."""
    reduced, cut, schedule = _cut_for(asked, staged, mesh, schedule)
    scheduled = Scheduled(cut, schedule, cut.stages, kinds_with_rows(reduced))
    sizes = replace(mesh, pp=cut.stages // schedule.stages_per_rank)
    wanted = tuple(dict.fromkeys(map(without_sequence, wanted))) if mesh.tp == 1 else tuple(wanted)
    made = _for_stages(replace(asked, reduced=reduced), wanted, replace(sizes, pp=1))
    programs = dict(zip(wanted, made, strict=True))
    trial = StagesTrial(reduced.reduced_model, programs, lower, sizes=sizes, scheduled=scheduled)
    return tuple(dict.fromkeys(one for found in trial.findings().values() for one in found))


def _meshes(asked: Question, staged: StagedPlan, *, multiple: bool) -> tuple[MeshSizes, ...]:
    """The meshes on which the stages run."""
    assert staged.resolved is not None
    sizes = simulated_sizes(asked.sizes, staged.resolved.data_parallel)
    pp = 2 if multiple else max(sizes.pp, asked.reduced.pp)
    return stage_meshes(replace(sizes, pp=pp, tp=sizes.of(Axis.TP)))


def _on_mesh(
    asked: Question, staged: StagedPlan, mesh: MeshSizes, wanted: Sequence[Overlays], schedule: Schedule
) -> PipelineProof:
    reduced, cut, schedule = _cut_for(asked, staged, mesh, schedule)
    if mesh.tp == 1:  # the sections give one program
        wanted = tuple(dict.fromkeys(map(without_sequence, wanted)))
    return prove_pipeline(replace(asked, reduced=reduced), cut, wanted, schedule, mesh)


def _cut_for(
    asked: Question, staged: StagedPlan, mesh: MeshSizes, schedule: Schedule
) -> tuple[ModelLayouts, PipelineCut, Schedule]:
    """The reduced model for a mesh, its cut, and the schedule that runs."""
    reduced = asked.reduced
    stages = mesh.pp * schedule.stages_per_rank
    if (mesh.tp, mesh.ep) != (reduced.tp, reduced.ep) or reduced.blocks < stages:
        blocks = max(reduced.blocks, stages)
        reduced = reduced.of(tp=mesh.of(Axis.TP), ep=mesh.ep, pp=stages, blocks=blocks, cp=1)
        staged = staged_plan(asked.plan, reduced)
    assert staged.resolved is not None, staged.findings
    if len(staged.resolved.pp_blocks) < stages:
        schedule, stages = ONE_EACH, mesh.pp
    return reduced, reduced_cut(staged, stages), schedule


def _digest(asked: Question, staged: StagedPlan, on: Overlays, schedule: Schedule) -> str | None:
    """The digest of the proof of one variant's stages (`digest_of`); None also where there is nothing to prove."""
    parts: list[str] = []
    try:
        lower = asked.lower_dtypes(on)
        for mesh in _meshes(asked, staged, multiple=schedule.multiple):
            reduced, cut, ran = _cut_for(asked, staged, mesh, schedule)
            (program,) = _programs(replace(asked, reduced=reduced), (on,), replace(mesh, pp=1))
            digest = digest_of(ModelNow(reduced), program, asked.allow_unproven, (mesh,), lower)
            if digest is None:
                return None
            parts.append(f"{digest} {cut} {ran}")
    except PlanError:
        return None
    return f"stages {schedule} {', '.join(parts)}"


def _unreached(asked: Question, wanted: Iterable[Overlays]) -> tuple[Diagnostic, ...]:
    """Findings for parts that the plan touches and that are reached only by inputs that cannot be divided into micro-batches."""
    reduced, kinds = asked.reduced, kinds_with_rows(asked.reduced)
    if kinds == reduced.reduced_model.kinds:
        return ()
    runs = [steps_of(reduced.reduced_model, kind, torch.float32, only=())[1] for kind in kinds]
    missing = tuple(unreached_parameters(reduced, runs, kinds))
    found = (unreached(missing, one, reduced, asked.allow_unproven) for one in _programs(asked, wanted, reduced.sizes))
    return tuple(dict.fromkeys(d for about in found for d in about))


def _programs(asked: Question, wanted: Iterable[Overlays], sizes: MeshSizes) -> list[Program]:
    compiled = compile_for(asked.reduced, asked.plan, sizes, wanted)
    return [program_of(compiled, on, logits=asked.logits, sections=EAGER) for on in wanted]


def _for_stages(asked: Question, wanted: Iterable[Overlays], sizes: MeshSizes) -> list[Program]:
    return [for_stages(with_data_parallel(one), wrapped=True) for one in _programs(asked, wanted, sizes)]


@reduced_runs()
def prove_stages_on_first_rank(
    asked: Question, staged: StagedPlan, on: Overlays, schedule: Schedule, mesh: DeviceMesh
) -> tuple[tuple[Diagnostic, ...], str]:
    """The findings of the proof of a plan's pipeline stages, and how they are known. The first rank of the mesh looks them up or
    proves, and sends the result to the others."""

    def answer() -> tuple[tuple[Diagnostic, ...], str]:
        digest = _digest(asked, staged, on, schedule)
        if (found := known(digest)) is not None:
            return found, EARLIER
        found = with_pipeline(NumericProof(MeshSizes(pp=2), ()), asked, staged, (on,), schedule)[1]
        remember(digest, found)
        return found, NOW

    return on_first_rank(answer, mesh)


def reduced_cut(staged: StagedPlan, stages: int) -> PipelineCut:
    """The cut of the reduced model that represents a cut into `stages` stages: it has the same number, as far as there are blocks."""
    assert staged.resolved is not None and staged.ok, staged.findings
    blocks = len(staged.resolved.pp_blocks)
    return pipeline_cut(staged.resolved, even_sizes(blocks, min(stages, blocks)))


@torch.random.fork_rng(devices=[])
def prove_pipeline(
    asked: Question,
    cut: PipelineCut,
    wanted: Iterable[Overlays] = (NO_OVERLAYS,),
    schedule: Schedule = ONE_EACH,
    mesh: MeshSizes | None = None,
) -> PipelineProof:
    """Run the stages of the reduced model on simulated ranks, a micro-batch for each, and compare them with the whole model.

    Args:
        mesh: the ranks; None is the tp and ep ranks of the reduced model, with pp.

    Raises:
        PlanError: SP436: a stage raises, but the whole model does not; SP438: no kind of input can be divided into micro-batches.
    """
    reduced = asked.reduced
    sizes = replace(mesh or reduced.sizes, pp=cut.stages // schedule.stages_per_rank)
    scheduled = Scheduled(cut, schedule, cut.stages, kinds_with_rows(reduced))
    programs = _for_stages(asked, wanted, replace(sizes, pp=1))

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
    except Exception as error:  # modelling code may raise anything
        raise PlanError((_raises(error),)) from error
    return PipelineProof(cut.sizes, cut.carried, rows)


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
    return (
        Diagnostic(
            code=STAGES,
            severity=Severity.ERROR,
            message=f"a step of the reduced model in {len(proof.sizes)} pipeline stages differs from the whole one's in "
            f"{len(wrong)} tensors",
            primary=label,
            notes=first_few(f"{row.kind} {row.name}: {amount_of(row.error)} ({row.where})" for row in wrong),
            help="use a mesh with pp 1",
        ),
    )


# The proof of pipeline stages in the dtypes of training: stages on their ranks, and the whole model, run the same micro-batches with
# FSDP2's casts, or under torch.autocast.
APART = 1000  # between the seeds of two draws


@dataclass(frozen=True, kw_only=True)
class StagesTrial(DtypeTrial):
    """The proof of stages in lower dtypes; its programs are for one stage.

    Args:
        sizes: of the mesh, with pp.
    """

    sizes: MeshSizes
    scheduled: Scheduled

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of inputs that have rows for micro-batches."""
        return self.scheduled.kinds

    @property
    def ranks(self) -> int:
        """The number of simulated ranks."""
        return few_batches(self.sizes).world_size

    def exact(self, kind: str, draw: int) -> tuple[MicroBatches, Steps]:
        """The micro-batches of a draw, and the whole model's step on them in float32."""
        batches = self._batches(kind, draw, torch.float32)
        before = torch.get_rng_state()
        steps = self._step(batches, self.built(draw))
        if torch.equal(before, torch.get_rng_state()):
            return batches, steps
        with DrawnAlike():
            return batches, replace(self._step(batches, self.built(draw)), drew=True)

    def cast_whole(self, kind: str, draw: int, dtype: torch.dtype) -> Steps:
        """The step of the whole model and inputs that are in a dtype themselves."""
        return self._step(self._batches(kind, draw, dtype), in_dtype(with_half(self.built(draw)), dtype))

    def _batches(self, kind: str, draw: int, dtype: torch.dtype) -> MicroBatches:
        def inputs(seed: int) -> dict[str, object]:
            return self.reduced_model.inputs(seed=APART * draw + seed, kind=kind)

        return MicroBatches(inputs, self.scheduled.micro_batches, 1, dtype)

    def _step(self, batches: MicroBatches, model: nn.Module) -> Steps:
        written = writes_to(model)
        step = one_step([model], batches, own=self._own(batches))
        buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
        parameters = {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)}
        return Steps([{"loss": step.loss}], [], step.gradients, buffers, parameters, written())

    def _own(self, batches: MicroBatches) -> bool:
        return batches.own(in_dtype(self.built(0), batches.dtype))

    def alone(self, model: nn.Module, program: Program, batches: MicroBatches, exact: Steps, on_ranks: OnRanks) -> Left:
        """The step of the whole model on one rank."""
        axes = (Axis.DP_SHARD,) if self.lower.precision is not None else ()

        def step(rank: int) -> Left:
            apply_program(
                model, mesh_of(program.resolved.sizes, axes), program, src_data_rank=0, autocast=self.lower.autocast
            )
            with DrawnAlike() if exact.drew else nullcontext():
                made = one_step([model], batches, own=self._own(batches))
            buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
            return Left([{"loss": made.loss}], {n: whole(x) for n, x in made.gradients.items()}, buffers, {})

        with common_to_ranks(model):
            (left,) = on_ranks(step)
        return left

    def sharded(self, known: Unsharded, on: Overlays, draw: int, on_ranks: OnRanks) -> list[Left]:
        """The step of each rank, with the tensors of the other stages."""
        sizes, first = few_batches(self.sizes), with_half(self.built(draw))
        program = self.in_dtype(self.programs[on])
        case = ScheduledCase(lambda: first, known.batches.inputs, program, sizes, self.scheduled, torch.float32)
        models = [first, *(copy_of(first, known.exact.written) for _ in range(sizes.world_size - 1))]
        casts = self.lower.precision is not None
        axes: Collection[Axis] = [
            axis for axis in AXES if axis is Axis.PP or sizes.of(axis) > 1 or (casts and axis is Axis.DP_SHARD)
        ]
        own = self._own(known.batches)
        with without_advice(), common_to_ranks(first):
            run = partial(case.step_of_rank, known.batches, axes, own=own, drew=known.exact.drew)
            lefts = on_ranks(lambda rank: run(models[rank], autocast=self.lower.autocast))
        return [
            replace(
                left,
                gradients={name: value for one in (*lefts, left) for name, value in one.gradients.items()},
                buffers={name: value for one in (*lefts, left) for name, value in one.buffers.items()},
            )
            for left in lefts
        ]
