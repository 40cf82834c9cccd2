"""What a training step of a planned model costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.compiler.overrides import Logits, Override
from shardplan.compiler.pipeline import Changes, Compiled
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, plan_name
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.sources import SourceMap
from shardplan.cost.step_options import check_load, modelled

from .deciding import Asked, program_or_raise
from .keywords import AnyMesh, model_of, sizes_of

if TYPE_CHECKING:
    from shardplan.core.estimates import Device, Estimate, Sweep, TrainingStep
    from shardplan.cost.pipeline_estimate import Unschedulable


def estimate(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh,
    step: TrainingStep,
    *,
    device: Device | str | None = None,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    compile: Override = None,
    pipeline_parallel: Override = None,
    regather: bool | None = None,
    derive: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Estimate:
    """What a training step of a planned model costs each rank, without memory and without a device: bytes, floating point
    operations, communication and, for a device, the least time. A few layers are traced and the rest extrapolated.

    Args:
        model, plan: as for `validate`. A module with inputs of its own is called with these, whatever the step's `seq_len` and
            `micro_batch` are.
        mesh: sizes by axis, `{"dp_shard": 8, "tp": 8}`, or a DeviceMesh; without tp it is 1.
        step: what one step is.
        device: the name of a device ("h200"), a JSON file that describes one, or a Device; None asks for no time.
        sequence_parallel, logits, data_parallel, activation_checkpointing, compile, pipeline_parallel, regather: as for
            `compile_plan`.
        derive: as for `validate`.
        progress: called with what is being done.

    Raises:
        PlanError: all that `validate` can tell; a step of the model cannot be traced (SP560).
        ValueError: a wrong size, word or device; a schedule that the mesh, the micro-batches or the plan do not allow; a data-parallel backend other than fsdp2; a process group exists.
    """
    changes = Changes(
        sequence_parallel, logits, data_parallel, activation_checkpointing, compile, pipeline_parallel, regather
    )
    asked = Asked(model_of(model), plan, changes, derive=derive)
    return estimated(asked, sizes_of(mesh), step, device, progress)


def estimated(
    asked: Asked,
    sizes: MeshSizes,
    step: TrainingStep,
    device: Device | str | None,
    progress: Callable[[str], None],
) -> Estimate:
    """The estimate of one mesh. Raises as `estimate`."""
    sizes = modelled(sizes)
    check_load(step, sizes.ep)
    (made,) = _estimates(asked, [sizes], step, device, progress)
    if isinstance(made, Exception):
        raise made
    return made


def sweep(
    model: AnyModel,
    plan: AnyPlan,
    gpus: int,
    step: TrainingStep,
    *,
    device: Device | str,
    ep: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    cp: Sequence[int] = (1,),
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    activation_checkpointing: Override = None,
    regather: bool | None = None,
    derive: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """The estimate of every mesh for a number of devices: pp x dp_replicate x dp_shard x cp x tp.

    Args:
        gpus: how many devices.
        ep: over how many ranks experts are distributed: each size is tried on each mesh that has it.
        pp: over how many ranks the stages of a pipeline are laid: each size is tried.
        cp: over how many ranks a sequence is distributed: each size is tried, without stages.
        sequence_parallel: with the plan's overlay, where tp is above 1.
        step: its `expert_load` is at most the largest `ep`; a mesh with a smaller one has all rows on one rank.
        model, plan and all others: as for `estimate`.

    Raises:
        PlanError: no mesh can be estimated.
        ValueError: as for `estimate`.
    """
    from shardplan.core.estimates import Sweep
    from shardplan.cost.mesh_candidates import in_order, meshes_of

    meshes = meshes_of(gpus, ep, pp, cp)
    changes = Changes(sequence_parallel, logits, None, activation_checkpointing, regather=regather)
    check_load(step, max(ep))
    made = _estimates(Asked(model_of(model), plan, changes, derive=derive), meshes, step, device, progress)
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
    asked: Asked,
    meshes: Iterable[MeshSizes],
    step: TrainingStep,
    device: Device | str | None,
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

    question = Question(asked.model.shown, plan_name(asked.plan), asked.changes.sequence_parallel, step)
    asked = replace(asked, seq_len=step.seq_len, allow_unproven=True)
    known = read_device(device) if isinstance(device, str) else device
    compiled: dict[tuple[int | None, int, bool, bool], Compiled] = {}
    made: list[Estimate | PlanError | Unschedulable] = []
    for sizes in meshes:
        try:
            split = sizes.tp, sizes.ep, sizes.pp > 1, sizes.cp > 1
            if split not in compiled:
                progress(f"compiling for tp {sizes.tp}")
                compiled[split] = asked.compiled(sizes, progress)
            program = program_or_raise(compiled[split])
            resolved = replace(program.resolved, sizes=sizes)
            raise_errors(check(resolved, seq_len=step.seq_len), SourceMap())
            found, _ = compiled[split].given.both
            made.append(estimate_mesh(found, replace(program, resolved=resolved), question, known, progress))
        except (PlanError, Unschedulable) as error:
            made.append(error)
    return made
