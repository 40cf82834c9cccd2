"""Compiling a plan, and sharding a model with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from shardplan.compiler.overrides import Logits, Override
from shardplan.compiler.pipeline import Changes
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model
from shardplan.core.suggest import with_known_names

from .deciding import Asked, decide, program_or_raise, prove_decided
from .keywords import AnyMesh, model_of, sizes_of
from .one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardplan.compiler.lower import Program
    from shardplan.runtime.apply import Applied
    from shardplan.runtime.apply.applied import AppliedParts
    from shardplan.runtime.pipeline import Pipeline, PipelineOptions


class ApplyOptions(TypedDict, total=False):
    """Keyword arguments of `apply_plan` besides `pipeline`."""

    sequence_parallel: bool
    logits: Logits
    data_parallel: Override
    activation_checkpointing: Override
    compile: Override
    pipeline_parallel: Override
    regather: bool | None
    derive: bool
    seq_len: int | None
    strict: bool
    prove: bool
    allow_unproven: bool
    axes: Mapping[str, str] | None
    ep: int | None
    check_inputs: bool
    src_data_rank: int | None
    autocast_dtype: torch.dtype | str | None
    patch_is_packed_sequence: bool


@with_known_names
@one_at_a_time
def compile_plan(
    model: AnyModel,
    mesh: AnyMesh,
    plan: AnyPlan,
    *,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    compile: Override = None,
    pipeline_parallel: Override = None,
    regather: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    allow_unproven: bool = False,
    derive: bool = True,
) -> Program:
    """Compile a plan for a model, without touching it. Deterministic, and equal on all ranks. Its layouts are checked;
    `validate` and `apply_plan` prove it numerically too.

    Args:
        model, plan: as for `validate`.
        mesh: a DeviceMesh with axis names, or the sizes alone, `{"tp": 8}`.
        sequence_parallel: lay the plan's overlay over it; with tp 1 there is nothing to split.
        logits: "plan", or the output head with whole ("replicated") or vocabulary-split ("sharded") logits, or without
            logits ("fused"): the loss makes them a chunk of tokens at a time, on one tp rank too; "as_stored": split
            where the plan splits the head over the vocabulary, else whole.
        data_parallel, activation_checkpointing, compile: a mapping overrides fields of the plan's section, or is the section of a plan
            that has none (without `modules`, on the plan's data-parallel units, wrapped or not); False leaves it out, None is
            as the plan says.
        pipeline_parallel: a mapping, likewise.
        regather: whether what is gathered along the sequence is gathered again in backward instead of being kept; None is as
            the plan says.
        seq_len: the sequence length in tokens, to check its divisibility.
        strict: warnings are errors.
        allow_unproven, derive: as for `validate`.

    Raises:
        PlanError: all findings of `validate` before its last stage.
        TypeError, ValueError: a wrong argument.
    """
    changes = Changes(
        sequence_parallel, logits, data_parallel, activation_checkpointing, compile, pipeline_parallel, regather
    )
    asked = Asked(model_of(model), plan, changes, seq_len, strict, allow_unproven, derive)
    return program_or_raise(asked.compiled(sizes_of(mesh)))


@overload
def apply_plan(
    model: nn.Module | Model,
    mesh: DeviceMesh,
    plan: AnyPlan,
    *,
    pipeline: PipelineOptions,
    **options: Unpack[ApplyOptions],
) -> Pipeline: ...


@overload
def apply_plan(
    model: nn.Module | Model,
    mesh: DeviceMesh,
    plan: AnyPlan,
    *,
    pipeline: None = None,
    **options: Unpack[ApplyOptions],
) -> nn.Module: ...


@with_known_names
def apply_plan(
    model: nn.Module | Model,
    mesh: DeviceMesh,
    plan: AnyPlan,
    *,
    pipeline: PipelineOptions | None = None,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    compile: Override = None,
    pipeline_parallel: Override = None,
    regather: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    allow_unproven: bool = False,
    derive: bool = True,
    prove: bool = True,
    axes: Mapping[str, str] | None = None,
    ep: int | None = None,
    check_inputs: bool = True,
    src_data_rank: int | None = 0,
    autocast_dtype: torch.dtype | str | None = None,
    patch_is_packed_sequence: bool = False,
) -> nn.Module | Pipeline:
    """Shard a model as a plan says: tensor and sequence parallelism, ties, activation checkpointing, compile, FSDP2; on a mesh
    with several pp ranks, cut into the stages of a pipeline, each sharded like that.

    The model is changed in place and returned (with the backend ddp, its wrapper). Names of modules and parameters
    stay. Make the optimizer afterwards. With stages, each rank keeps its own in the returned Pipeline: parts of other
    ranks never get memory and are never sent or moved, and nothing is left in the given model. The plan is compiled and
    proven for the whole model; its section `pipeline_parallel` says what the repeated blocks are.

    Args:
        model: on the meta device, the CPU or a CUDA device, not sharded yet; or a `Model` of it, with `inputs` or `reduced`.
        mesh: a DeviceMesh with axis names: `tp` and any of `pp` (the outermost), `dp_replicate`, `dp_shard`, `cp` (other common
            spellings are understood). Without tp there is no tensor parallelism, without dp_shard no data parallelism.
        plan, sequence_parallel, logits, data_parallel, activation_checkpointing, compile, regather, seq_len, strict,
        allow_unproven, derive: as for `compile_plan`. Where "auto" derives a plan, the mesh's first rank derives it for
            all. With stages `data_parallel` keeps gathered parameters between micro-batches (`reshard_after_forward: false`) unless the
            plan or the argument says otherwise.
        pipeline: the schedule and the micro-batches, on a mesh with several pp ranks; None: the defaults of `PipelineOptions`.
        prove: prove the plan numerically on the mesh's first rank before anything is sharded, unless this process has proven
            it before (`validate`). Without it, `applied(model)` says "not proven".
        ep: over how many ranks experts are distributed, by the plan's `expert_parallel` section: the innermost of dp_shard x cp x tp.
            None: as `build_mesh` says, else 1.
        axes: axis -> the mesh's name for it, where it is none of the known spellings.
        check_inputs: compare the tensor arguments over tp and cp, at the training forwards 1, 2, 4, ..., 512 and every 1,000th, and name
            the ranks that were fed another batch (RuntimeError, at the first forward before it runs, later at the next one); once
            the weights of replicas; and under FSDP2, at each forward of a model that takes several kinds of inputs
            (images and text), which of them the ranks were given (RuntimeError before it runs).
        src_data_rank: the tp rank whose weights count; None: every rank has the same weights, send nothing.
        autocast_dtype: run the model's forward under torch.autocast in this dtype, bfloat16 or float16.
        patch_is_packed_sequence: keep transformers' flash attention from looking for packed sequences in every layer,
            which makes the device wait; in this process, with a warning, and an error for packed inputs.

    Returns:
        The model; on a mesh with several pp ranks a Pipeline, the stages of this rank and their step. Type checkers know of it
        where `pipeline` is given.

    Raises:
        PlanError: all findings of `validate`, and those about the cut; the model is untouched.
        ValueError, TypeError: a wrong argument, a model that is sharded already, `pipeline` on a mesh without pp; the model is
            untouched.
        RuntimeError: ranks compiled different programs (untouched), or a step failed on one of them (the model is unusable
            then, and its forward raises).
    """
    from shardplan.model.packed import patch_is_packed_sequence as patch_packed
    from shardplan.runtime.apply.early_optimizers import Originals
    from shardplan.runtime.apply.failed_steps import Ranks
    from shardplan.runtime.apply.mixed_tensors import explain_uncaught
    from shardplan.runtime.apply.phases import apply_program, refuse_used
    from shardplan.runtime.apply.plan_mesh import read_mesh
    from shardplan.runtime.apply.random_numbers import draws_of, shared_seed
    from shardplan.runtime.apply.unfit_models import refuse_source, refuse_unfit
    from shardplan.runtime.pipeline.apply_stages import apply_stages
    from shardplan.runtime.pipeline.pipeline_options import read_pipeline

    named = model_of(model)
    module = refuse_unfit(named.name)
    refuse_used(module)
    plan_mesh = read_mesh(mesh, axes, ep)
    refuse_source(src_data_rank, plan_mesh.tp_size)
    stages = read_pipeline(pipeline, plan_mesh)
    changes = Changes(
        sequence_parallel, logits, data_parallel, activation_checkpointing, compile, pipeline_parallel, regather
    )
    asked = Asked(named, plan, changes, seq_len, strict, allow_unproven, derive)
    decided = decide(asked, plan_mesh, stages, autocast_dtype)
    found, proof = prove_decided(asked, decided, mesh, prove=prove)
    program, layout, originals = decided.program, decided.layout, Originals(module)
    seed = shared_seed(plan_mesh) if draws_of(program) else None
    how: dict[str, Any] = {"src_data_rank": src_data_rank, "autocast": decided.autocast, "seed": seed}
    how |= {"diagnostics": (*decided.warnings, *found), "proof": proof, "derived": decided.derived}
    result: nn.Module | Pipeline
    if stages is None or layout is None:
        result = apply_program(module, plan_mesh, program, ranks=Ranks(mesh), kind="model", compare=check_inputs, **how)
    else:
        result = apply_stages(
            module, layout, program, stages.micro_batches, stages.loss_fn, compare=check_inputs, **how
        )
    originals.refuse_optimizers(result)
    explain_uncaught()
    if patch_is_packed_sequence:
        patch_packed()
    return result


@overload
def applied(model: nn.Module) -> Applied: ...


@overload
def applied(model: Pipeline) -> AppliedParts: ...


def applied(model: nn.Module | Pipeline) -> Applied | AppliedParts:
    """What `apply_plan` did to a model: its program, warnings, steps and expected collectives; printable. For a Pipeline, what
    was done to this rank's stages.

    Raises:
        ValueError: no plan was applied to it, or applying one failed half-way.
    """
    from shardplan.runtime.apply import applied as lookup

    return lookup(model)
