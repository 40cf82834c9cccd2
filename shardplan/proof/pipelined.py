"""The proof of pipeline stages. The stages of a real run, sharded by the plan, run in a schedule on every rank of a mesh, and are compared
with the unsharded model on the same micro-batches. The ranks are threads or processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.randomness import DrawnAlike
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
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.pipeline import Pipeline
from shardplan.runtime.pipeline.apply_stages import apply_stages
from shardplan.runtime.pipeline.layout_of_stages import layout_on
from shardplan.torchlib.equality import magnitude
from shardplan.torchlib.gathering import of_all, without_advice
from shardplan.torchlib.modes import CheckedSizes

from .compare import NEGLIGIBLE, compare, worst_of
from .exact import in_precision_of
from .proof_batches import MicroBatches, objective, rowwise_kinds
from .rank import Left, data_parallel_rank, mesh_of, whole
from .simulate import common_to_ranks, copy_of
from .steps import STEPS, separate
from .threads import OnRanks

NO_ROWS = Code("SP438")

EVALUATION = "loss of an evaluation"
AXES = (Axis.PP, *(axis for axis in APPLIED if axis is not Axis.CP))  # a mesh with pp has no cp


@dataclass(frozen=True)
class Scheduled:
    """A schedule and its stages for a proof.

    Args:
        cut: the cut of the reduced model, with the schedule's number of stages.
        kinds: the kinds of inputs whose tensors have one row for each row of the batch.
    """

    cut: PipelineCut
    schedule: Schedule
    micro_batches: int
    kinds: tuple[str, ...]


def scheduled_for(
    layouts: ModelLayouts, staged: StagedPlan, schedule: Schedule, micro_batches: int | None
) -> Scheduled:
    """The run of a plan on a reduced model.

    Args:
        layouts: those of a reduced model with a block for each of the schedule's stages on all ranks.
        staged: the plan's stages, without errors.
        micro_batches: their number; None is twice the number of stages.

    Raises:
        PlanError: SP438: no kind of input can be divided into micro-batches.
        ValueError: the reduced model has fewer blocks than stages.
    """
    kinds = kinds_with_rows(layouts)
    assert staged.resolved is not None and staged.ok, staged.findings
    blocks, stages = len(staged.resolved.pp_blocks), layouts.pp
    if blocks < stages:
        raise ValueError(f"the reduced model has {blocks} blocks, too few for the {stages} stages of {schedule.name}")
    cut = pipeline_cut(staged.resolved, even_sizes(blocks, stages))
    return Scheduled(cut, schedule, micro_batches or 2 * stages, kinds)


def kinds_with_rows(layouts: ModelLayouts) -> tuple[str, ...]:
    """The kinds of inputs that can be divided into micro-batches. Raises PlanError (SP438) where there are none."""
    kinds = rowwise_kinds(layouts.reduced_model)
    if not kinds:
        raise PlanError((_no_rows(layouts),))
    return kinds


def _no_rows(layouts: ModelLayouts) -> Diagnostic:
    kinds = ", ".join(layouts.reduced_model.kinds)
    return Diagnostic(
        code=NO_ROWS,
        severity=Severity.ERROR,
        message=f"the inputs of {layouts.found.name} ({kinds}) cannot be divided into micro-batches",
        notes=("the first dim of each tensor must be the batch, and all else the same for each row",),
        help="use a mesh with pp 1",
    )


@dataclass(frozen=True)
class ScheduledCase:
    """A schedule's run on every rank of a mesh; ranks may be processes or threads.

    Args:
        build: makes the unsharded model, the same everywhere.
        inputs: (seed, kind) -> one micro-batch.
        program: the program of the whole model; each stage's is a part of it.
        sizes: those of the mesh, with pp.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    program: Program
    sizes: MeshSizes
    scheduled: Scheduled
    dtype: torch.dtype

    def rows(self) -> tuple[Comparison, ...]:
        """The run on this rank, a process: mesh axes of any size, with FSDP2. All ranks call it together."""
        return self.of_rank(self.expected(STEPS), self.built(), AXES)

    def simulated(self, on_ranks: OnRanks) -> tuple[Comparison, ...]:
        """The run on ranks that are threads; each row is the worst of all ranks. It has one step, unless a forward changes a buffer."""
        expected, first = self.expected(1), self.built()
        models = [first, *(copy_of(first, expected.written) for _ in range(self.sizes.world_size - 1))]
        axes = [axis for axis in AXES if axis is Axis.PP or self.sizes.of(axis) > 1]

        def run(rank: int) -> tuple[Comparison, ...]:
            with CheckedSizes():
                return self.of_rank(expected, models[rank], axes)

        with without_advice(), common_to_ranks(expected.models[0]):
            return worst_of(row for rows in on_ranks(run) for row in rows)

    def built(self) -> nn.Module:
        return in_dtype(self.build(), self.dtype)

    def expected(self, steps: int) -> _Expected:
        """The unsharded model's results on the micro-batches. If it draws random numbers, it runs once more with the ranks' draws.

        Args:
            steps: the least number of steps; there are STEPS where a forward changes buffers or parameters.
        """
        batches = MicroBatches(self.inputs, self.scheduled.micro_batches, self.sizes.replicas, self.dtype)
        before = torch.get_rng_state()
        made = self._expected(batches, steps, drew=False)
        drew = not torch.equal(before, torch.get_rng_state())
        return self._expected(batches, steps, drew=True) if drew else made

    def _expected(self, batches: MicroBatches, steps: int, *, drew: bool, evaluates: bool = True) -> _Expected:
        models = [self.built() for _ in range(batches.replicas)]
        own = batches.own(self.built())
        before = {name: value.clone() for name, value in _state(models[0])}
        with DrawnAlike() if drew else nullcontext():
            made = [one_step(models, batches, own=own)]
            changed = frozenset(name for name, value in _state(models[0]) if not torch.equal(value, before[name]))
            made += [one_step(models, batches, step, own=own) for step in range(1, STEPS if changed else steps)]
            evaluated = None
            if evaluates:
                try:
                    evaluated = _evaluation(models, batches, own=own)
                except Exception:  # modelling code may raise anything: there is nothing to compare with
                    return self._expected(batches, steps, drew=drew, evaluates=False)
        return _Expected(batches, own, models, tuple(made), changed, evaluated, drew)

    def of_rank(self, expected: _Expected, model: nn.Module, axes: Collection[Axis]) -> tuple[Comparison, ...]:
        """Apply the program to the stages of this rank, run the steps, evaluate, and compare. All ranks call it together.

        Args:
            model: this rank's own copy; it is used up.
            axes: as in `mesh_of`.
        """
        mesh = mesh_of(self.sizes, axes)
        index = data_parallel_rank(mesh)
        pipeline = self._applied(mesh, model, own=expected.own)
        rows: list[Comparison] = []
        for step, right in enumerate(expected.steps):
            rows.append(self._loss(pipeline, expected, step, index, "loss", right.loss))
            rows += self._gradients(pipeline, right.gradients)
            pipeline.zero_grad()
        if expected.evaluated is None:
            rows.append(Comparison(EVALUATION, "output", 0.0, "every stage", "unproven"))
        else:
            with torch.no_grad():
                rows.append(self._loss(pipeline.eval(), expected, 0, index, EVALUATION, expected.evaluated))
        right_model, written = expected.models[index], expected.written
        buffers = dict(right_model.named_buffers(remove_duplicate=False))
        held = _held(pipeline, lambda part: part.named_buffers(remove_duplicate=False))
        parameters = {n: p.detach() for n, p in right_model.named_parameters(remove_duplicate=False) if n in written}
        changed = _held(pipeline, lambda part: self._whole(part, lambda p: p.detach(), parameters))
        return worst_of((*rows, *_own("buffer", buffers, held), *_own("parameter", parameters, changed)))

    def _loss(
        self, pipeline: Pipeline, expected: _Expected, step: int, index: int, name: str, right: Tensor
    ) -> Comparison:
        """Run a step on the batch of a data-parallel rank, and compare its loss."""
        given = expected.batches.together(step, index)
        tokens = None if expected.own else self.scheduled.micro_batches * expected.batches.replicas
        with in_precision_of(expected.models[0]), DrawnAlike() if expected.drew else nullcontext():
            loss = pipeline.step(tokens=tokens, **given)
        return compare(name, "output", [(_place(pipeline, max(pipeline.by_stage)), loss)], right.to(loss.dtype))

    def step_of_rank(
        self,
        batches: MicroBatches,
        axes: Collection[Axis],
        model: nn.Module,
        *,
        own: bool,
        drew: bool,
        autocast: torch.dtype | None,
    ) -> Left:
        """Apply the program to the stages of this rank, and run one step: the loss, and the gradients and buffers of these stages. All
        ranks call it together.

        Args:
            batches: the same for each data-parallel rank.
            axes: as in `mesh_of`.
            model: this rank's own copy; it is used up.
            own, drew: as in `_Expected`.
            autocast: as for `apply_program`.
        """
        pipeline = self._applied(mesh_of(self.sizes, axes), model, own=own, autocast=autocast)
        tokens = None if own else batches.count * self.sizes.replicas
        with CheckedSizes(), DrawnAlike() if drew else nullcontext():
            loss = pipeline.step(tokens=tokens, **batches.together(0, 0))
        held = _held(pipeline, lambda part: self._whole(part, lambda parameter: parameter.grad))
        gradients = {name: value for name, values in held.items() for _, value in values if value is not None}
        buffers = _held(pipeline, lambda part: part.named_buffers(remove_duplicate=False))
        there = {name: value for name, values in buffers.items() for _, value in values if value is not None}
        return Left([{"loss": loss.detach()}], gradients, there, {})

    def _whole(
        self, part: nn.Module, of: Callable[[nn.Parameter], Tensor | None], names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        """The whole tensors for some parameters. A collective over the ranks of the stage."""
        packed, tp = packed_parameters(self.program), self.sizes.tp or 1
        for name, parameter in part.named_parameters(remove_duplicate=False):
            if names is None or name in names:
                value = of(parameter)
                yield name, None if value is None else whole(value, packed.get(name), tp)

    def _applied(self, mesh: PlanMesh, model: nn.Module, *, own: bool, autocast: torch.dtype | None = None) -> Pipeline:
        scheduled = self.scheduled
        return apply_stages(
            model,
            layout_on(mesh, scheduled.cut, scheduled.schedule),
            self.program,
            scheduled.micro_batches,
            None if own else objective,
            compare=True,
            src_data_rank=0,
            autocast=autocast,
        )

    def _gradients(self, pipeline: Pipeline, expected: Mapping[str, Tensor]) -> Iterator[Comparison]:
        """Compare the gradients of the parameters of this rank's stages."""
        floor = NEGLIGIBLE * max((magnitude(g) for g in expected.values()), default=0.0)
        held = _held(pipeline, lambda part: self._whole(part, lambda parameter: parameter.grad))
        return _own("gradient", expected, held, floor)


Held = Mapping[str, Sequence[tuple[str, Tensor | None]]]  # name -> (place, tensor there)


def _held(pipeline: Pipeline, tensors: Callable[[nn.Module], Iterable[tuple[str, Tensor | None]]]) -> Held:
    """The tensors of each stage of this rank."""
    found: dict[str, list[tuple[str, Tensor | None]]] = defaultdict(list)
    for stage, part in pipeline.by_stage.items():
        for name, value in tensors(unwrapped(pipeline.module_of(part))):
            found[name].append((_place(pipeline, stage), None if value is None else value.detach()))
    return found


def _place(pipeline: Pipeline, stage: int) -> str:
    alone = dist.get_world_size() == pipeline.layout.mesh.sizes.pp
    return f"stage {stage}" if alone else f"stage {stage}, rank {dist.get_rank()}"


def _own(kind: Compared, expected: Mapping[str, Tensor], held: Held, floor: float = 0.0) -> Iterator[Comparison]:
    """Compare this rank's tensors with the expected ones; a tensor that no rank has is missing on all. A collective."""
    nowhere = expected.keys() - {name for some in of_all(sorted(held)) for name in some}
    yield from (Comparison(name, kind, float("inf"), "every stage", "differs") for name in sorted(nowhere))
    for name, values in held.items():
        there = [(place, value) for place, value in values if value is not None]
        if name in expected and len(there) == len(values):
            yield compare(name, kind, there, expected[name], floor)
        elif name in expected or there:
            yield Comparison(name, kind, float("inf"), values[0][0], "differs")


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class _Reference:
    """One step of the unsharded model over the micro-batches of all data-parallel ranks."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Expected:
    """The unsharded model's results.

    Args:
        own: whether they use the model's own loss.
        models: one for each data-parallel rank, with the state that its micro-batches left.
        written: the names of buffers and parameters that forwards change.
        evaluated: the loss of the first step's micro-batches in evaluation mode, after the steps; None if the model does not run in it.
        drew: whether it draws random numbers.
    """

    batches: MicroBatches
    own: bool
    models: Sequence[nn.Module]
    steps: Sequence[_Reference]
    written: frozenset[str]
    evaluated: Tensor | None
    drew: bool


def one_step(models: Sequence[nn.Module], batches: MicroBatches, step: int = 0, *, own: bool) -> _Reference:
    """One step: each rank differentiates its share x the number of ranks, and the gradients are averaged, as in data parallelism. So code
    in the model that changes a gradient (clips or normalises it) sees the same gradient as in training.

    Args:
        models: one for each data-parallel rank, with the same weights, as each has its own buffers.
    """
    gradients: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for index, model in enumerate(models):
        for part in range(batches.count):
            with in_precision_of(model):
                loss = batches.loss_of(model, step, index, part, own=own)
                (loss * batches.replicas).backward()
            separate(model)
            total += loss.detach().double()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                share = parameter.grad.detach() / batches.replicas
                gradients[name] = gradients[name] + share if name in gradients else share
        model.zero_grad(set_to_none=True)
    return _Reference(total, gradients)


@torch.no_grad()
def _evaluation(models: Sequence[nn.Module], batches: MicroBatches, *, own: bool) -> Tensor:
    """The loss of the first step's micro-batches in evaluation mode; the models stay in that mode."""
    total = torch.zeros((), dtype=torch.float64)
    for index, model in enumerate(models):
        with in_precision_of(model.eval()):
            for part in range(batches.count):
                total += batches.loss_of(model, 0, index, part, own=own).double()
    return total


@dataclass(frozen=True)
class ScheduledRecipe:
    """Makes the cases, one for each kind of input: each process makes the reduced model anew.

    Args:
        source: the model itself.
        heads_times, blocks: options of its reduced model.
    """

    source: Model
    program: Program
    sizes: MeshSizes
    scheduled: Scheduled
    heads_times: int
    blocks: int

    def cases(self, dtype: torch.dtype) -> Iterator[ScheduledCase]:
        found, sizes = self.source.find(), self.sizes
        assert sizes.tp is not None  # a proof has one size
        layouts = ModelLayouts(found, sizes.tp, sizes.ep, self.heads_times, sizes.pp, self.blocks)
        reduced = layouts.reduced_model
        for kind in self.scheduled.kinds:

            def inputs(seed: int, kind: str = kind) -> dict[str, Any]:
                return reduced.inputs(seed=seed, kind=kind)

            yield ScheduledCase(reduced.build, inputs, self.program, sizes, self.scheduled, dtype)
