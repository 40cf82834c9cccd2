"""What a training step of a planned model costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from shardplan.compiler.pipeline import Changes, Compiled, compile_variant
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model, plan_name
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.sources import SourceMap
from shardplan.cost.step_options import StepOptions, check_load, modelled, step_of

from .deciding import program_or_raise
from .deriving import deriving
from .keywords import AnyMesh, MeshOptions, ModelOptions, PlanOptions, model_of, sizes_of, split_options

if TYPE_CHECKING:
    from shardplan.core.estimates import Device, Estimate, Sweep, TrainingStep
    from shardplan.cost.pipeline_estimate import Unschedulable


class SweepOptions(ModelOptions, PlanOptions, StepOptions, Changes, total=False):
    """Keyword arguments of `sweep`."""


class EstimateOptions(SweepOptions, MeshOptions, total=False):
    """Keyword arguments of `estimate`."""


def estimate(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh | None = None,
    step: TrainingStep | None = None,
    *,
    device: Device | str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """What a training step of a planned model costs each rank, without memory and without a device: bytes, floating point
    operations, communication and, for a device, the least time. A few layers are traced and the rest extrapolated.

    Args:
        model, plan: as for `validate`.
        mesh: sizes by axis, `{"dp_shard": 8, "tp": 8}`; instead of it the keywords `tp`, `dp_shard`, `dp_replicate`, `cp`, `ep`, `pp`.
        step: what one step is; instead of it the keywords of its fields:
        seq_len: tokens of a sequence.
        micro_batch: sequences in one forward of a data-parallel rank.
        precision: the dtype of stored parameters, gradients and optimizer state: "bf16", "bfloat16", torch.bfloat16; likewise
            fp16 and fp32. What is computed in follows from it and from the plan's mixed_precision.
        optimizer: torch's: "adamw" or "sgd" as it is without options on a GPU, "adamw-fused", "adamw-for-loop"; or "none".
        micro_batches: forwards and backwards before the optimizer steps, of a pipeline or accumulated.
        schedule: of pipeline stages: gpipe, 1f1b or interleaved.
        expert_load: the busiest ep rank's share of all rows for experts, over the mean of the ranks, from 1 (an even load) to ep;
            the figures are that rank's.
        device: the name of a device ("h200"), a JSON file that describes one, or a Device; None asks for no time.
        sequence_parallel, logits, data_parallel, activation_checkpointing, regather: as for `apply_plan`.
        derive, inputs, reduced, settings, trust_remote_code: as for `validate`. A module with inputs of its own is called with these,
            whatever `seq_len` and `micro_batch` are.
        progress: called with what is being done.

    Raises:
        PlanError: all that `validate` can tell; a step of the model cannot be traced (SP560).
        ValueError: a wrong size, word or device; a schedule that the mesh, the micro-batches or the plan do not allow; a data-parallel backend other than fsdp2; a process group exists.
    """
    of_model, of_plan, of_mesh, of_step, changes = split_options(
        "estimate", options, ModelOptions, PlanOptions, MeshOptions, StepOptions, Changes
    )
    sizes, named, asked = modelled(sizes_of(mesh, of_mesh)), model_of(model, of_model), step_of(step, of_step)
    check_load(asked, sizes.ep)
    (made,) = _estimates(named, plan, of_plan, [sizes], asked, device, changes, progress)
    if isinstance(made, Exception):
        raise made
    return made


def sweep(
    model: AnyModel,
    plan: AnyPlan,
    gpus: int,
    step: TrainingStep | None = None,
    *,
    device: Device | str,
    ep: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    cp: Sequence[int] = (1,),
    progress: Callable[[str], None] = lambda text: None,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """The estimate of every mesh for a number of devices: pp x dp_replicate x dp_shard x cp x tp.

    Args:
        gpus: how many devices.
        ep: over how many ranks experts are distributed: each size is tried on each mesh that has it.
        pp: over how many ranks the stages of a pipeline are laid: each size is tried.
        cp: over how many ranks a sequence is distributed: each size is tried, without stages.
        sequence_parallel: with the plan's overlay, where tp is above 1.
        expert_load: as for `estimate`, at most the largest `ep`; a mesh with a smaller one has all rows on one rank.
        model, plan and all others: as for `estimate`.

    Raises:
        PlanError: no mesh can be estimated.
        ValueError: as for `estimate`.
    """
    from shardplan.core.estimates import Sweep
    from shardplan.cost.mesh_candidates import in_order, meshes_of

    meshes = meshes_of(gpus, ep, pp, cp)
    of_model, of_plan, of_step, changes = split_options(
        "sweep", options, ModelOptions, PlanOptions, StepOptions, Changes
    )
    named, asked = model_of(model, of_model), step_of(step, of_step)
    check_load(asked, max(ep))
    made = _estimates(named, plan, of_plan, meshes, asked, device, changes, progress)
    errors = {sizes: one for sizes, one in zip(meshes, made, strict=True) if isinstance(one, Exception)}
    if len(errors) == len(meshes):
        raise errors[meshes[0]]
    reasons = tuple((sizes, _why(error)) for sizes, error in errors.items())
    return Sweep(gpus, in_order(one for one in made if not isinstance(one, Exception)), reasons)


def _why(error: Exception) -> str:
    """The first finding of a plan on a mesh, or what its schedule lacks."""
    if not isinstance(error, PlanError):
        return str(error)
    first = next(d for d in error.diagnostics if d.is_error)
    return " ".join((first.message, *(f"({note})" for note in first.notes[:1])))


def _estimates(
    model: Model,
    plan: AnyPlan,
    of_plan: PlanOptions,
    meshes: Iterable[MeshSizes],
    step: TrainingStep,
    device: Device | str | None,
    changes: Changes,
    progress: Callable[[str], None],
) -> list[Estimate | PlanError | Unschedulable]:
    """The estimate of each mesh, or why there is none. The plan is compiled once for each size of the axes tp and ep, with
    stages and without, with chunks of the sequence and without."""
    from shardplan.compiler.check import check
    from shardplan.core.estimates import Question
    from shardplan.cost.devices import read_device
    from shardplan.cost.estimate import estimate_mesh
    from shardplan.cost.pipeline_estimate import Unschedulable
    from shardplan.report.errors import raise_errors

    asked = Question(model.shown, plan_name(plan), changes.get("sequence_parallel", False), step)
    known = read_device(device) if isinstance(device, str) else device
    compiled: dict[tuple[int | None, int, bool, bool], Compiled] = {}
    made: list[Estimate | PlanError | Unschedulable] = []
    for sizes in meshes:
        try:
            split = sizes.tp, sizes.ep, sizes.pp > 1, sizes.cp > 1
            if split not in compiled:
                progress(f"compiling for tp {sizes.tp}")
                overlay = changes.get("sequence_parallel", False)
                derive = deriving(model, of_plan, sizes, sequence_parallel=overlay, progress=progress)
                compiled[split] = compile_variant(
                    model, sizes, plan, changes, seq_len=step.seq_len, allow_unproven=True, derive=derive
                )
            program = program_or_raise(compiled[split])
            resolved = replace(program.resolved, sizes=sizes)
            raise_errors(check(resolved, seq_len=step.seq_len), SourceMap())
            found, _ = compiled[split].given.both
            made.append(estimate_mesh(found, replace(program, resolved=resolved), asked, known, progress))
        except (PlanError, Unschedulable) as error:
            made.append(error)
    return made
