"""The cost of a training step of a planned model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardplan.compiler.check import check
from shardplan.compiler.overrides import Logits, Override
from shardplan.compiler.pipeline import Changes
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, plan_name
from shardplan.core.estimates import Device, EngineRanks, Estimate, Question, TrainingStep
from shardplan.core.mesh import MeshSizes
from shardplan.core.sources import SourceMap
from shardplan.core.suggest import with_known_names
from shardplan.cost.step_options import check_load, modelled
from shardplan.report.errors import raise_errors

from .deciding import Asked, program_or_raise
from .keywords import AnyMesh, model_of, sizes_of
from .one_at_a_time import one_at_a_time


@with_known_names
@one_at_a_time
def estimate(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh,
    step: TrainingStep,
    *,
    device: Device | str | None = None,
    engine: EngineRanks | None = None,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    compile: Override = None,
    pipeline_parallel: Override = None,
    separate_matrices: Override = None,
    regather: bool | None = None,
    derive: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Estimate:
    """Estimate what a training step of a planned model costs on each rank: bytes, floating-point operations, communication and,
    for a device, the least time. It needs no device and no memory for the model: a few layers are traced, the rest extrapolated.

    Args:
        model, plan: as for `validate`. A module with inputs of its own is called with these inputs; the step's `seq_len` and
            `micro_batch` do not change them.
        mesh: sizes by axis, `{"dp_shard": 8, "tp": 8}`, or a DeviceMesh; tp is 1 where it is left out.
        step: the batch, precision and optimizer of one step.
        device: the name of a device ("h200"), a JSON file that describes one, or a Device; None estimates no time.
        engine: the ranks of an inference engine that get the weights after each step; this refit is estimated too.
        sequence_parallel, logits, data_parallel, activation_checkpointing, compile, pipeline_parallel, separate_matrices,
        regather: as for `compile_plan`.
        derive: as for `validate`.
        progress: called with what is being done.

    Raises:
        PlanError: all findings of `validate`; a step of the model cannot be traced (SP560).
        ValueError: a wrong size, word or device; a schedule that the mesh, the micro-batches or the plan do not allow; a data-parallel
            backend other than fsdp2; a process group that already exists; an engine together with stages (pp).
    """
    changes = Changes(
        sequence_parallel=sequence_parallel,
        logits=logits,
        data_parallel=data_parallel,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        pipeline_parallel=pipeline_parallel,
        separate_matrices=separate_matrices,
        regather=regather,
    )
    asked = Asked(model_of(model), plan, changes, derive=derive)
    made = estimated(asked, sizes_of(mesh), step, device, progress)
    if engine is None:
        return made
    from .refitting import refit_estimate

    return replace(made, refit=refit_estimate(asked, sizes_of(mesh), step, engine, made.device, progress))


def estimated(
    asked: Asked,
    sizes: MeshSizes,
    step: TrainingStep,
    device: Device | str | None,
    progress: Callable[[str], None],
) -> Estimate:
    """The estimate for one mesh. Raises as `estimate`."""
    from shardplan.cost.devices import read_device
    from shardplan.cost.estimate import estimate_mesh

    sizes = modelled(sizes)
    check_load(step, sizes.ep)
    question = Question(asked.model.shown, plan_name(asked.plan), asked.changes.sequence_parallel, step)
    known = read_device(device) if isinstance(device, str) else device
    progress(f"compiling for tp {sizes.tp}")
    compiled = replace(asked, seq_len=step.seq_len, allow_unproven=True).compiled(sizes, progress)
    program = program_or_raise(compiled)
    raise_errors(check(program.resolved, seq_len=step.seq_len), SourceMap())
    found, _ = compiled.given.both
    return estimate_mesh(found, program, question, known, progress)
