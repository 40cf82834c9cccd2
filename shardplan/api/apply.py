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
    from shardplan.runtime.pipeline import Pipeline, PipelineOptions


class ApplyOptions(TypedDict, total=False):
    """The keyword arguments of `apply_plan`, without `pipeline`."""

    sequence_parallel: bool
    logits: Logits
    data_parallel: Override
    activation_checkpointing: Override
    compile: Override
    pipeline_parallel: Override
    separate_matrices: Override
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
    separate_matrices: Override = None,
    regather: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    allow_unproven: bool = False,
    derive: bool = True,
) -> Program:
    """Compile a plan for a model, without changing the model. The result is deterministic, and equal on all ranks. The layouts
    are checked; `validate` and `apply_plan` also prove the plan numerically.

    Args:
        model, plan: as for `validate`.
        mesh: a DeviceMesh with axis names, or only the sizes, `{"tp": 8}`.
        sequence_parallel: use the plan's sequence-parallel section too; with tp 1 it splits nothing.
        logits: the output head's logits. "plan": as the plan says; "replicated": whole; "sharded": split over the vocabulary;
            "fused": none, the loss computes them for a chunk of tokens at a time (also with tp 1); "as_stored": split over
            the vocabulary where the plan splits the head's weight so, else whole.
        data_parallel, activation_checkpointing, compile: a mapping overrides fields of the plan's section; where the plan has no such
            section, the mapping is the section (without `modules`, it is for the plan's data-parallel units, wrapped or not).
            False leaves the section out, None keeps the plan's.
        pipeline_parallel: a mapping that overrides fields of the plan's section, or is the section.
        separate_matrices: the same; False leaves the section out. With it, "auto" takes the plan for the model's layers also with tp 1.
        regather: whether the backward gathers activations along the sequence again, instead of keeping those that the forward
            gathered; None is as the plan says.
        seq_len: the sequence length in tokens, whose divisibility is checked.
        strict: treat warnings as errors.
        allow_unproven, derive: as for `validate`.

    Raises:
        PlanError: all findings that `validate` has before its proof.
        TypeError, ValueError: a wrong argument.
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
    separate_matrices: Override = None,
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
    """Shard a model as a plan says: tensor and sequence parallelism, ties, activation checkpointing, compile, FSDP2. On a mesh
    with several pp ranks, the model is cut into pipeline stages, and each stage is sharded in this way.

    The model is changed in place and returned (with the backend ddp, its wrapper is returned). Modules and parameters keep
    their names. Make the optimizer afterwards. With stages, the returned Pipeline holds this rank's stages: the stages of other
    ranks never get memory and are never sent or moved, and the given model is left empty. The plan is compiled and
    proven for the whole model; its section `pipeline_parallel` names the repeated blocks.

    Args:
        model: on the meta device, the CPU or a CUDA device, not sharded yet; or a `Model` of it, with `inputs` or `reduced`.
        mesh: a DeviceMesh with axis names: `tp` and any of `pp` (the outermost), `dp_replicate`, `dp_shard`, `cp`. Other common
            spellings are understood. Without tp there is no tensor parallelism, without dp_shard no data parallelism.
        plan, sequence_parallel, logits, data_parallel, activation_checkpointing, compile, separate_matrices, regather, seq_len, strict,
        allow_unproven, derive: as for `compile_plan`. Where "auto" derives a plan, the mesh's first rank derives it for
            all. With stages, gathered parameters are kept between micro-batches (`reshard_after_forward: false`) unless the
            plan or `data_parallel` says otherwise.
        pipeline: the schedule and the micro-batches, on a mesh with several pp ranks; None is the defaults of `PipelineOptions`.
        prove: prove the plan numerically on the mesh's first rank before anything is sharded, unless this process has already
            proven it (with `validate`). Where False, `applied(model)` says "not proven".
        ep: the number of ranks over which the plan's `expert_parallel` section distributes the experts; they are the innermost
            ranks of dp_shard x cp x tp. None is the ep of `build_mesh`, else 1.
        axes: axis -> the mesh's name for it, where that is not a known spelling.
        check_inputs: compare the tensor arguments over tp and cp, at the training forwards 1, 2, 4, ..., 512 and every 1,000th. A
            RuntimeError names the ranks with another batch, at the first forward before it runs, later at the next forward. Also
            compare the weights of replicas once. Under FSDP2, for models that take several kinds of inputs (images and text),
            also compare at each forward which kinds the ranks were given (RuntimeError before it runs).
        src_data_rank: the tp rank whose weights are sent to the others; None sends nothing, as all ranks have the same weights.
        autocast_dtype: run the model's forward under torch.autocast in this dtype, bfloat16 or float16.
        patch_is_packed_sequence: keep transformers' flash attention from looking for packed sequences in every layer, which
            makes the CPU wait for the device. It holds for this process, with a warning; packed inputs are then an error.

    Returns:
        The model; on a mesh with several pp ranks a Pipeline, with this rank's stages and their step. For type checkers it is
        a Pipeline where `pipeline` is given.

    Raises:
        PlanError: all findings of `validate`, and those about the stages; the model is untouched. Where all ranks have the same
            error, the mesh's first rank has its whole text, and the others have its first line.
        ValueError, TypeError: a wrong argument, a model that is already sharded, `pipeline` on a mesh without pp; the model is
            untouched.
        RuntimeError: the ranks compiled different programs (the model is untouched), or a step failed on one of them (the model
            cannot be used then, and its forward raises).
    """
    from shardplan.model.packed import patch_is_packed_sequence as patch_packed
    from shardplan.runtime.apply.early_optimizers import Originals
    from shardplan.runtime.apply.failed_steps import Ranks
    from shardplan.runtime.apply.gathered_steps import step_shards
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
        sequence_parallel=sequence_parallel,
        logits=logits,
        data_parallel=data_parallel,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        pipeline_parallel=pipeline_parallel,
        separate_matrices=separate_matrices,
        regather=regather,
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
    step_shards(result)
    explain_uncaught()
    if patch_is_packed_sequence:
        patch_packed()
    return result
