"""Cutting a model into pipeline stages, and sharding each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from shardplan.compiler.pipeline import Changes, compile_variant
from shardplan.compiler.user_inputs import AnyPlan, Model

from .apply import ApplyOptions, LiveModelOptions, program_or_raise, prove_splits
from .deriving import deriving
from .keywords import PlanOptions, split_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardplan.compiler.lower import Program
    from shardplan.runtime.apply.plan_mesh import PlanMesh
    from shardplan.runtime.pipeline import Pipeline


def apply_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: AnyPlan,
    *,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    stages_per_rank: int | None = None,
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    prove: bool = True,
    allow_unproven: bool = False,
    axes: Mapping[str, str] | None = None,
    ep: int | None = None,
    moe_mesh: DeviceMesh | None = None,
    check_inputs: bool = True,
    src_data_rank: int | None = 0,
    autocast_dtype: torch.dtype | str | None = None,
    **options: Unpack[ApplyOptions],
) -> Pipeline:
    """Cut a model into pipeline stages over the mesh's axis pp, and shard each stage as `apply_plan` shards a model.

    The plan is compiled and proven for the whole model. Its section `pipeline_parallel` says what the repeated blocks are.
    Each rank keeps the stages that the schedule lays on it; what belongs to others is never given memory, sent or moved.
    Names stay. Nothing is left in the model that was given.

    Args:
        mesh: as for `apply_plan`, with an axis pp, the outermost.
        schedule: gpipe, 1f1b or interleaved, or the name of torch's class.
        micro_batches: how many parts the batch of a step has, on each data-parallel rank.
        stages_per_rank: of a schedule that works with several numbers; None: as the section's `sizes` say, else the
            schedule's least.
        loss_fn: (logits, labels) of a micro-batch -> the sum over its tokens, a scalar. None: the model computes its loss.
        other arguments: as for `apply_plan`. `data_parallel` keeps gathered parameters between micro-batches
            (`reshard_after_forward: false`) unless the plan or the argument says otherwise.

    Returns:
        The stages of this rank, and their step.

    Raises:
        PlanError: all findings of `validate`, and those about the cut; the model is untouched.
        ValueError, TypeError: a wrong argument, a model that is sharded already; the model is untouched.
        RuntimeError: ranks compiled different programs (untouched), or a step failed on one of them (the model is unusable
            then).
    """
    from shardplan.proof.prove_stages import prove_pipeline_on_first_rank
    from shardplan.report.errors import raise_errors
    from shardplan.runtime.apply.agreement import intention, same_on_all_ranks
    from shardplan.runtime.apply.autocast import read_dtype
    from shardplan.runtime.apply.early_optimizers import Originals
    from shardplan.runtime.apply.phases import refuse_used
    from shardplan.runtime.apply.plan_mesh import read_mesh
    from shardplan.runtime.apply.random_numbers import draws_of, shared_seed
    from shardplan.runtime.apply.unfit_models import refuse_source, refuse_unfit
    from shardplan.runtime.pipeline.apply_stages import apply_stages
    from shardplan.runtime.pipeline.layout_of_stages import lay_out, read_call
    from shardplan.runtime.pipeline.refused_plans import for_stages

    of_model, of_plan, changes = split_options("apply_pipeline", options, LiveModelOptions, PlanOptions, Changes)
    refuse_used(refuse_unfit(model))
    plan_mesh, named = read_mesh(mesh, axes, ep, moe_mesh), Model(model, **of_model)
    refuse_source(src_data_rank, plan_mesh.tp_size)
    record = read_call(plan_mesh, schedule, micro_batches)
    with same_on_all_ranks(mesh) as agreement:
        compiled = compile_variant(
            named,
            plan_mesh.sizes,
            plan,
            changes,
            seq_len=seq_len,
            strict=strict,
            allow_unproven=allow_unproven,
            derive=deriving(
                named,
                of_plan,
                plan_mesh.sizes,
                sequence_parallel=changes.get("sequence_parallel", False),
                share=agreement.share,
            ),
        )
        program, warnings = program_or_raise(compiled), compiled.findings
        program = for_stages(program, wrapped=_wrapped(plan_mesh, program))
        plan_mesh.check_sections(program.resolved)
        autocast = read_dtype(autocast_dtype, program.resolved.data_parallel)
        layout = lay_out(plan_mesh, program.resolved, record, stages_per_rank, micro_batches)
        agreement.say(f"{intention(program)}\nautocast {autocast}\n{layout.cut}\n{record.name} {micro_batches}")
    about, proof = prove_splits(
        compiled, named, changes, program, mesh, prove=prove, strict=strict, allow_unproven=allow_unproven
    )
    warnings = (*warnings, *about)
    if prove and compiled.reduced_model is not None and compiled.staged is not None and compiled.staged.ok:
        found = prove_pipeline_on_first_rank(compiled.reduced_model, compiled.staged, plan_mesh.sizes.pp, mesh)
        raise_errors(found, compiled.given.sources, strict=strict)
        proof = proof if plan_mesh.tp_size > 1 else "proven before it was applied, on a reduced model"
    originals = Originals(model)
    pipeline = apply_stages(
        model,
        layout,
        program,
        micro_batches,
        loss_fn,
        compare=check_inputs,
        src_data_rank=src_data_rank,
        autocast=autocast,
        seed=shared_seed(plan_mesh) if draws_of(program) else None,
        diagnostics=warnings,
        proof=proof,
        derived=compiled.given.derived,
    )
    originals.refuse_optimizers(pipeline)
    return pipeline


def _wrapped(mesh: PlanMesh, program: Program) -> bool:
    """Whether the data-parallel backend of the plan has ranks on the mesh."""
    from shardplan.styles.backends import BACKENDS

    section = program.resolved.data_parallel
    return section is not None and mesh.data_parallel(BACKENDS[section.backend]) is not None
