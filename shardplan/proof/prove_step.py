"""`verify --step`: runs a user's step on gloo processes of a mesh, and on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from shardplan.authoring.router_runs import AUXILIARY
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.stage_plan import staged_plan
from shardplan.compiler.lower.program import Program
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.overrides import Logits
from shardplan.compiler.pipeline_cut import pipeline_cut
from shardplan.compiler.user_inputs import Model
from shardplan.core.diagnostics import Code, Diagnostic, PlanError, Severity
from shardplan.core.mesh import APPLIED, MeshSizes
from shardplan.core.plan import NO_OVERLAYS, Overlays, PlanFile
from shardplan.core.schedules import Schedule, schedule_of
from shardplan.model.adapters import unwrapped
from shardplan.model.reduced.precision import in_dtype
from shardplan.runtime.apply.mixed_tensors import help_for
from shardplan.torchlib.modes import reduced_runs

from .pipelined import AXES, Scheduled, scheduled_for
from .processes import check_sendable, run_on_ranks
from .prove import EAGER, compile_for
from .rank import data_parallel_rank, mesh_of
from .step_causes import Alone, Difference, off
from .step_differences import among_ranks, in_one_process, not_compared, on_ranks
from .step_watch import Ran, merged
from .steps import Batch, cast
from .user_step import MICRO, STEPS, Trial, dealt, joined, run_trial

DIFFERENT_STEP = Code("SP561")
ALONE = MeshSizes(tp=1)


@dataclass(frozen=True)
class StepQuestion:
    """A step, and the setting of its proof.

    Args:
        script: the path of the user's file.
        reduced: the reduced model's layouts for the mesh.
        sizes: those of the mesh.
        on: the variant of the plan.
        schedule, micro_batches: those of a pipeline, with several pp ranks.
    """

    script: str
    reduced: ModelLayouts
    source: Model
    plan: PlanFile
    sizes: MeshSizes
    on: Overlays = NO_OVERLAYS
    logits: Logits = "plan"
    schedule: Schedule | None = None
    micro_batches: int | None = None


@dataclass(frozen=True)
class StepTask:
    """The data that each process needs.

    Args:
        program: on `sizes`; `single` is the same plan's program on one process.
        staged: how the pipeline of each runs, if there is one.
        axes: the reduced model's, as in `ModelLayouts`.
    """

    script: str
    source: Model
    program: Program
    single: Program
    sizes: MeshSizes
    axes: Mapping[str, Any]
    staged: tuple[Scheduled, Scheduled] | None = None

    @cached_property
    def reduced(self) -> Any:
        return ModelLayouts(self.source.find(), **self.axes).reduced_model

    @property
    def shares(self) -> int:
        return self.sizes.replicas

    def build(self) -> nn.Module:
        return in_dtype(self.reduced.build(), torch.float64)

    @cached_property
    def rows_apart(self) -> bool:
        """Whether the model's loss of a row depends on no other row, as for text, except for routers' additions."""
        config = getattr(unwrapped(self.reduced.build()), "config", None)
        return self.reduced.kinds[0] == "text" and config is not None and AUXILIARY not in vars(config)

    def batches(self, *, alike: bool) -> list[list[list[Batch]]]:
        """Micro-batches by step and data-parallel rank."""
        kind = self.reduced.kinds[0]
        masked = kind == "text" and self.sizes.cp == 1

        def feed(seed: int) -> Batch:
            rows = 1 if self.staged is None else self.staged[0].micro_batches
            given = joined([self.reduced.feeder(kind, seed * rows + row, None) for row in range(rows)])
            return cast(given, torch.float64)

        return [dealt(feed, step, self.shares, alike=alike, masked=masked) for step in range(STEPS)]

    def trial(self, batches: Sequence[list[Batch]], *, alone: bool, alike: bool) -> Trial:
        sizes, program = (ALONE, self.single) if alone else (self.sizes, self.program)
        staged = None if self.staged is None else self.staged[alone]
        return Trial(self.script, self.build, program, sizes, batches, alike, staged)


@reduced_runs()
def alone_on(task: StepTask) -> tuple[Alone, bool]:
    """The script's results in this one process, and whether it draws random numbers."""

    def flat(steps: Sequence[Sequence[list[Batch]]]) -> list[list[Batch]]:
        return [[batch for share in step for batch in share] for step in steps]

    every, cut = task.batches(alike=False), task.batches(alike=not task.rows_apart)
    run = partial(task.trial, alone=True, alike=False)
    same, drew = run_trial(run(flat(every)))
    if drew:
        return Alone(run_trial(task.trial(flat(every), alone=True, alike=True))[0]), True
    parts = run_trial(run(flat(cut)[:1]))[0]
    pieces: list[Ran] = []
    whole = run_trial(run([[joined(step)] for step in flat(cut)[:1]]))[0]
    if off(parts[0].backward, whole[0].backward):
        pieces = [run_trial(run([[batch]]))[0][0] for batch in flat(cut)[0]]
    shares = [run_trial(run([every[0][share]]))[0][0] for share in range(task.shares)]
    return Alone(same, parts, whole, pieces, shares), False


@reduced_runs()
def rank_of(task: StepTask, drew: bool) -> tuple[list[Ran], list[Ran]]:
    """The script's results on this rank; if it draws random numbers, once with draws that depend only on shapes, and once with its own."""
    own = data_parallel_rank(mesh_of(task.sizes, APPLIED if task.staged is None else AXES))
    batches = [step[own] for step in task.batches(alike=False)]
    found = run_trial(task.trial(batches, alone=False, alike=drew))[0]
    return found, run_trial(task.trial(batches, alone=False, alike=False))[0] if drew else []


def differences(task: StepTask, alone: Alone, ranks: Sequence[tuple[list[Ran], list[Ran]]]) -> list[Difference]:
    """The step's errors: the first one of each kind of comparison."""
    ranks = list(_with_stages(task, ranks))
    found = in_one_process(alone, task.shares * MICRO)
    if (
        not found
        and all(unlike for _, unlike in ranks)
        and (one := among_ranks([unlike for _, unlike in ranks], task.sizes.tp or 1)) is not None
    ):
        found.append(one)
    experts = frozenset(
        name for name in alone.same[0].backward if any(name.startswith(f"{module}.") for module in task.program.experts)
    )
    if not found and (one := on_ranks(alone, [own for own, _ in ranks], experts)) is not None:
        found.append(one)
    return found


def _with_stages(task: StepTask, ranks: Sequence[tuple[list[Ran], list[Ran]]]) -> Iterator[tuple[list[Ran], list[Ran]]]:
    """Each rank's results with those of the ranks that have the other stages of its model."""
    apart = len(ranks) // task.sizes.pp

    def of(rank: int, kind: int) -> list[Ran]:
        others = [both[kind] for both in ranks[rank % apart :: apart]]
        return [merged(own, [run[step] for run in others]) for step, own in enumerate(ranks[rank][kind])]

    for rank in range(len(ranks)):
        yield of(rank, 0), of(rank, 1)


def task_of(asked: StepQuestion) -> StepTask:
    """The task for the processes.

    Raises:
        PlanError: the plan has errors on the reduced model.
    """
    reduced, sizes = asked.reduced, asked.sizes

    def program(sizes: MeshSizes, on: Overlays) -> Program:
        compiled = compile_for(reduced, asked.plan, sizes, [on], asked=True)
        return program_of(compiled, on, logits=asked.logits, sections=EAGER)

    programs = program(sizes, asked.on), program(ALONE, NO_OVERLAYS)
    staged = None
    if sizes.pp > 1:
        cut, schedule = staged_plan(asked.plan, reduced), asked.schedule
        assert schedule is not None
        own = scheduled_for(reduced, cut, schedule, asked.micro_batches)
        assert cut.resolved is not None
        whole = pipeline_cut(cut.resolved, (len(cut.resolved.pp_blocks),))
        staged = own, replace(own, cut=whole, schedule=schedule_of("gpipe"))
    return StepTask(asked.script, asked.source, *programs, sizes, reduced.axes, staged)


def prove_step(
    asked: StepQuestion, progress: Callable[[str], None] = lambda text: None
) -> tuple[tuple[Diagnostic, ...], tuple[str, ...]]:
    """Run a script's step on processes of a mesh, and compare it with one process.

    Returns:
        The errors, and the values that the script keeps and that differ from one process without being errors.

    Raises:
        ValueError: processes cannot find the model; a schedule does not fit.
    """
    check_sendable(asked.source)
    try:
        task = task_of(asked)
    except PlanError as error:
        return error.diagnostics, ()
    try:
        progress(f"{task.script}: the step on one process")
        [(alone, drew)] = run_on_ranks(1, alone_on, task)
    except RuntimeError as error:
        help = _help(error, "run the script in one process first")
        return (_finding(Difference(f"on one process {error}", help), task),), ()
    try:
        progress(f"{task.script}: the step on {task.sizes.world_size} processes")
        ranks = run_on_ranks(task.sizes.world_size, rank_of, task, drew)
    except RuntimeError as error:
        help = _help(error, "do on all ranks what one does")
        return (_finding(Difference(f"{error}; one process does not", help), task),), ()
    wrong = tuple(_finding(one, task) for one in differences(task, alone, ranks))
    return wrong, () if wrong else not_compared(alone, [own for own, _ in _with_stages(task, ranks)])


def _help(error: RuntimeError, otherwise: str) -> str:
    return help_for(error) or otherwise


def _finding(found: Difference, task: StepTask) -> Diagnostic:
    place = task.script if found.line is None else f"{task.script}:{found.line}"
    return Diagnostic(DIFFERENT_STEP, Severity.ERROR, found.message, notes=(place,), help=found.help)
