"""The proof of a schedule in real processes: pipeline stages on every rank of pp, each sharded as the plan says, against the same
micro-batches in the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.stage_plan import StagedPlan
from shardplan.compiler.lower.program import Program
from shardplan.compiler.pipeline_cut import even_sizes, pipeline_cut
from shardplan.compiler.user_inputs import Model
from shardplan.core.diagnostics import Code, Diagnostic, PlanError, Severity
from shardplan.core.mesh import APPLIED, Axis, MeshSizes
from shardplan.core.report import Compared, Comparison
from shardplan.core.schedules import Schedule
from shardplan.core.stages import PipelineCut
from shardplan.model.adapters import unwrapped
from shardplan.model.reduced.precision import in_dtype
from shardplan.runtime.apply.plan_mesh import PlanMesh, read_mesh
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.apply_stages import apply_stages
from shardplan.runtime.pipeline.layout_of_stages import layout_on
from shardplan.torchlib.equality import magnitude

from .compare import NEGLIGIBLE, compare, worst_of
from .exact import in_precision_of
from .proof_batches import MicroBatches, objective, own_loss, rowwise_kinds
from .rank import whole
from .steps import STEPS, separate

NO_ROWS = Code("SP438")

AXES = (Axis.PP, *(axis for axis in APPLIED if axis is not Axis.CP))  # a mesh with pp has no cp


@dataclass(frozen=True)
class Scheduled:
    """What runs.

    Args:
        cut: of the reduced model, with as many stages as the schedule has.
        kinds: of inputs whose tensors have a row for each row of the batch.
    """

    cut: PipelineCut
    schedule: Schedule
    micro_batches: int
    kinds: tuple[str, ...]


def scheduled_for(
    layouts: ModelLayouts, staged: StagedPlan, schedule: Schedule, micro_batches: int | None
) -> Scheduled:
    """What runs of a plan on a reduced model.

    Args:
        layouts: of a reduced model for as many stages as the schedule has on all ranks, with a block for each.
        staged: without errors.
        micro_batches: None: twice as many as stages.

    Raises:
        PlanError: SP438: no inputs that micro-batches can be made of.
        ValueError: the reduced model has fewer blocks than stages.
    """
    kinds = rowwise_kinds(layouts.reduced_model)
    if not kinds:
        raise PlanError((_no_rows(layouts),))
    assert staged.resolved is not None and staged.ok, staged.findings
    blocks, stages = len(staged.resolved.pp_blocks), layouts.pp
    if blocks < stages:
        raise ValueError(f"the reduced model has {blocks} blocks, too few for the {stages} stages of {schedule.name}")
    cut = pipeline_cut(staged.resolved, even_sizes(blocks, stages))
    return Scheduled(cut, schedule, micro_batches or 2 * stages, kinds)


def _no_rows(layouts: ModelLayouts) -> Diagnostic:
    kinds = ", ".join(layouts.reduced_model.kinds)
    return Diagnostic(
        code=NO_ROWS,
        severity=Severity.ERROR,
        message=f"the inputs of {layouts.found.name} ({kinds}) cannot be divided into micro-batches",
        notes=("the first dim of each tensor must be the batch, and all else the same for each row",),
        help="leave --processes out: the stages then run one after the other on the whole batch",
    )


@dataclass(frozen=True)
class ScheduledCase:
    """What one process needs to run a schedule.

    Args:
        build: makes the unsharded model, the same in every process.
        inputs: (seed, kind) -> one micro-batch.
        program: of the whole model; each stage's is a part of it.
        sizes: of the mesh, pp included.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    program: Program
    sizes: MeshSizes
    scheduled: Scheduled
    dtype: torch.dtype

    def rows(self) -> tuple[Comparison, ...]:
        """Apply the program to the stages of this rank, run the steps, and compare. All ranks call it together."""
        shape, names = tuple(map(self.sizes.of, AXES)), tuple(axis.value for axis in AXES)
        mesh = read_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), ep=self.sizes.ep)
        replicas = mesh.data_parallel_ranks
        batches = MicroBatches(self.inputs, self.scheduled.micro_batches, replicas, self.dtype)
        index = mesh.mesh.get_local_rank("dp_replicate") * self.sizes.dp_shard + mesh.mesh.get_local_rank("dp_shard")
        models = [in_dtype(self.build(), self.dtype) for _ in range(replicas)]
        own = own_loss(in_dtype(self.build(), self.dtype), batches.one(0, 0, 0))
        pipeline = self._applied(mesh, own=own)
        expected = [_reference(models, batches, step, own=own) for step in range(STEPS)]
        rows: list[Comparison] = []
        for step, right in enumerate(expected):
            given = batches.together(step, index)
            tokens = None if own else self.scheduled.micro_batches * replicas
            with in_precision_of(models[0]):
                loss = pipeline.step(tokens=tokens, **given)
            rows.append(compare("loss", "output", [("", loss)], right.loss.to(loss.dtype)))
            rows += self._gradients(pipeline, right.gradients)
            pipeline.zero_grad()
        buffers = {name: buffer.detach() for name, buffer in models[index].named_buffers(remove_duplicate=False)}
        found = {
            name: buffer.detach()
            for part in pipeline.parts
            for name, buffer in _inner(pipeline, part).named_buffers(remove_duplicate=False)
        }
        return worst_of((*rows, *_own("buffer", buffers, found, found)))

    def _applied(self, mesh: PlanMesh, *, own: bool) -> Pipeline:
        scheduled = self.scheduled
        return apply_stages(
            in_dtype(self.build(), self.dtype),
            layout_on(mesh, scheduled.cut, scheduled.schedule),
            self.program,
            scheduled.micro_batches,
            None if own else objective,
            compare=True,
            src_data_rank=0,
        )

    def _gradients(self, pipeline: Pipeline, expected: Mapping[str, Tensor]) -> Iterator[Comparison]:
        """Of the parameters that this rank's stages have."""
        floor = NEGLIGIBLE * max((magnitude(g) for g in expected.values()), default=0.0)
        packed, tp = packed_parameters(self.program), self.sizes.tp or 1
        own = {
            name: parameter.grad
            for part in pipeline.parts
            for name, parameter in _inner(pipeline, part).named_parameters(remove_duplicate=False)
        }
        found = {name: whole(grad, packed.get(name), tp) for name, grad in own.items() if grad is not None}
        return _own("gradient", expected, found, own, floor)


def _inner(pipeline: Pipeline, part: nn.Module) -> nn.Module:
    return unwrapped(pipeline.module_of(part))


def _own(
    kind: Compared,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    names: Iterable[str],
    floor: float = 0.0,
) -> Iterator[Comparison]:
    """What this rank has, against what it should have. A collective.

    Args:
        names: those that its stages have; what no rank has is missing on all.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sorted(names))
    nowhere = expected.keys() - {name for some in every for name in some}
    for name in sorted(nowhere | found.keys() | (expected.keys() & set(names))):
        if name in found and name in expected:
            yield compare(name, kind, [("", found[name])], expected[name], floor)
        else:
            yield Comparison(name, kind, float("inf"), "", "differs")


@dataclass(frozen=True)
class _Reference:
    """One step of the unsharded model over the micro-batches of all data-parallel ranks."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


def _reference(models: Sequence[nn.Module], batches: MicroBatches, step: int, *, own: bool) -> _Reference:
    """Args:
    models: one for each data-parallel rank, of the same weights: each has buffers of its own.
    """
    gradients: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for index, model in enumerate(models):
        for part in range(batches.count):
            with in_precision_of(model):
                loss = batches.loss_of(model, step, index, part, own=own)
            loss.backward()
            separate(model)
            total += loss.detach().double()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad.detach()
        model.zero_grad(set_to_none=True)
    return _Reference(total, gradients)


@dataclass(frozen=True)
class ScheduledRecipe:
    """The cases, for each kind of input: each process makes the reduced model anew.

    Args:
        source: the model itself.
        heads_times, blocks: of its reduced model.
    """

    source: Model
    program: Program
    sizes: MeshSizes
    scheduled: Scheduled
    heads_times: int
    blocks: int

    def cases(self, dtype: torch.dtype) -> Iterator[ScheduledCase]:
        found, sizes = self.source.find(), self.sizes
        assert sizes.tp is not None  # a proof is of one size
        layouts = ModelLayouts(found, sizes.tp, sizes.ep, self.heads_times, sizes.pp, self.blocks)
        reduced = layouts.reduced_model
        for kind in self.scheduled.kinds:

            def inputs(seed: int, kind: str = kind) -> dict[str, Any]:
                return reduced.inputs(seed=seed, kind=kind)

            yield ScheduledCase(reduced.build, inputs, self.program, sizes, self.scheduled, dtype)
