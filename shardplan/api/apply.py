"""Compiling a plan, and sharding a model with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict, Unpack, overload

from shardplan.compiler.pipeline import Changes, Compiled, compile_variant
from shardplan.compiler.user_inputs import AnyInputs, AnyModel, AnyPlan, AnyReduced, Model

from .deriving import deriving
from .keywords import AnyMesh, ModelOptions, PlanOptions, model_of, sizes_of, split_options

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardplan.compiler.lower import Program
    from shardplan.core.diagnostics import Diagnostic
    from shardplan.runtime.apply import Applied
    from shardplan.runtime.apply.applied import AppliedParts
    from shardplan.runtime.pipeline import Pipeline


class CompileOptions(ModelOptions, PlanOptions, Changes, total=False):
    """Keyword arguments of `compile_plan`."""


class LiveModelOptions(TypedDict, total=False):
    """Options of a live module."""

    inputs: AnyInputs | None
    reduced: AnyReduced | None


class ApplyOptions(LiveModelOptions, PlanOptions, Changes, total=False):
    """Keyword arguments of `apply_plan`."""


def compile_plan(
    model: AnyModel,
    mesh: AnyMesh,
    plan: AnyPlan,
    *,
    seq_len: int | None = None,
    strict: bool = False,
    allow_unproven: bool = False,
    **options: Unpack[CompileOptions],
) -> Program:
    """Compile a plan for a model, without touching it. Deterministic, and equal on all ranks. Its layouts are checked;
    `validate` and `apply_plan` prove it numerically too.

    Args:
        model, plan: as for `validate`.
        mesh: a DeviceMesh with axis names, or the sizes alone, `{"tp": 8}`.
        sequence_parallel: lay the plan's overlay over it; with tp 1 there is nothing to split.
        logits: "plan", or the output head with whole ("replicated") or vocabulary-split ("sharded") logits; "as_stored": split where
            the plan splits the head over the vocabulary, else whole.
        data_parallel, activation_checkpointing, compile: a mapping overrides fields of the plan's section, False
            leaves the section out, True takes its defaults (on the plan's data-parallel units, wrapped or not), None is as
            the plan says.
        regather: whether what is gathered along the sequence is gathered again in backward instead of being kept; None is as
            the plan says.
        seq_len: the sequence length in tokens, to check its divisibility.
        strict: warnings are errors.
        allow_unproven, derive, inputs, reduced, settings, trust_remote_code: as for `validate`.

    Raises:
        PlanError: all findings of `validate` before its last stage.
        TypeError, ValueError: a wrong argument.
    """
    of_model, of_plan, changes = split_options("compile_plan", options, ModelOptions, PlanOptions, Changes)
    named, sizes, overlay = model_of(model, of_model), sizes_of(mesh, {}), changes.get("sequence_parallel", False)
    compiled = compile_variant(
        named,
        sizes,
        plan,
        changes,
        seq_len=seq_len,
        strict=strict,
        allow_unproven=allow_unproven,
        derive=deriving(named, of_plan, sizes, sequence_parallel=overlay),
    )
    return program_or_raise(compiled)


def program_or_raise(compiled: Compiled) -> Program:
    """The program. Raises PlanError with what was found where there is none."""
    from shardplan.report.errors import raise_errors

    raise_errors(compiled.findings, compiled.given.sources)
    assert compiled.program is not None
    return compiled.program


def prove_splits(
    compiled: Compiled,
    named: Model,
    changes: Changes,
    program: Program,
    mesh: DeviceMesh,
    *,
    prove: bool,
    strict: bool,
    allow_unproven: bool,
) -> tuple[tuple[Diagnostic, ...], str]:
    """Prove what the program splits over tp, on the mesh's first rank for all: the warnings, and how it is known to be right, in words.

    Raises:
        PlanError: the proof found errors.
    """
    from shardplan.proof.stage import Question, prove_on_first_rank
    from shardplan.report.errors import raise_errors

    if (program.resolved.sizes.tp or 1) == 1:
        return (), "data parallel only: nothing is split"
    if not prove:
        return (), "not proven: prove=False"
    if compiled.reduced_model is None:
        return (), "not proven: it cannot be (allow_unproven)"
    _, read = compiled.given.both
    asked = Question(compiled.reduced_model, named, read, changes.get("logits", "plan"), allow_unproven)
    found, method = prove_on_first_rank(asked, program.resolved.overlays, mesh)
    raise_errors(found, compiled.given.sources, strict=strict)
    return tuple(found), f"proven {method}, on a reduced model"


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: AnyPlan,
    *,
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
    patch_is_packed_sequence: bool = False,
    **options: Unpack[ApplyOptions],
) -> nn.Module:
    """Shard a model as a plan says: tensor and sequence parallelism, ties, activation checkpointing, compile, FSDP2.

    The model is changed in place and returned (with the backend ddp, its wrapper). Names of modules and parameters
    stay. Make the optimizer afterwards.

    Args:
        model: on the meta device, the CPU or a CUDA device, not sharded yet.
        mesh: a DeviceMesh with axis names: `tp` and any of `dp_replicate`, `dp_shard`, `cp` (other common spellings are
            understood). Without tp there is no tensor parallelism, without dp_shard no data parallelism.
        plan, sequence_parallel, logits, data_parallel, activation_checkpointing, compile, regather, seq_len, strict,
        allow_unproven, derive, inputs, reduced: as for `compile_plan`. Where "auto" derives a plan, the mesh's first rank derives it for
            all.
        prove: prove the plan numerically on the mesh's first rank before anything is sharded, unless this process has proven
            it before (`validate`). Without it, `applied(model)` says "not proven".
        ep: over how many ranks experts are distributed, by the plan's `expert_parallel` section: the innermost of dp_shard x cp x tp.
            None: as `moe_mesh`, a mesh with the axes (ep_shard, ep), or `build_mesh` says, else 1.
        axes: axis -> the mesh's name for it, where it is none of the known spellings.
        check_inputs: compare the tensor arguments over tp, at the training forwards 1, 2, 4, ..., 512 and every 1,000th, and name
            the ranks that were fed another batch (RuntimeError, at the first forward before it runs, later at the next one); once
            the weights of replicas; and under FSDP2, at each forward of a model that takes several kinds of inputs (images beside text),
            which of them the ranks were given (RuntimeError before it runs).
        src_data_rank: the tp rank whose weights count; None: every rank has the same weights, send nothing.
        autocast_dtype: run the model's forward under torch.autocast in this dtype, bfloat16 or float16.
        patch_is_packed_sequence: keep transformers' flash attention from looking for packed sequences in every layer,
            which makes the device wait; in this process, with a warning, and an error for packed inputs.

    Raises:
        PlanError: all findings of `validate`; the model is untouched.
        ValueError, TypeError: a wrong argument, a model that is sharded already; the model is untouched.
        RuntimeError: ranks compiled different programs (untouched), or a step failed on one of them (the model is unusable
            then, and its forward raises).
    """
    from shardplan.model.packed import patch_is_packed_sequence as patch_packed
    from shardplan.runtime.apply.agreement import intention, same_on_all_ranks
    from shardplan.runtime.apply.autocast import read_dtype
    from shardplan.runtime.apply.early_optimizers import Originals
    from shardplan.runtime.apply.failed_steps import Ranks
    from shardplan.runtime.apply.guards import guard
    from shardplan.runtime.apply.phases import apply_program, refuse_used
    from shardplan.runtime.apply.plan_mesh import read_mesh
    from shardplan.runtime.apply.random_numbers import draws_of, shared_seed
    from shardplan.runtime.apply.unfit_models import refuse_source, refuse_unfit

    of_model, of_plan, changes = split_options("apply_plan", options, LiveModelOptions, PlanOptions, Changes)
    refuse_used(refuse_unfit(model))
    plan_mesh, named = read_mesh(mesh, axes, ep, moe_mesh), Model(model, **of_model)
    if plan_mesh.sizes.pp > 1:
        raise ValueError(
            f"the mesh has {plan_mesh.sizes.pp} ranks on its axis pp, and apply_plan shards whole models: apply_pipeline cuts a "
            "model into stages"
        )
    refuse_source(src_data_rank, plan_mesh.tp_size)
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
        plan_mesh.check_sections(program.resolved)
        autocast = read_dtype(autocast_dtype, program.resolved.data_parallel)
        agreement.say(f"{intention(program)}\nautocast {autocast}")
    found, proof = prove_splits(
        compiled, named, changes, program, mesh, prove=prove, strict=strict, allow_unproven=allow_unproven
    )
    warnings = (*warnings, *found)
    originals = Originals(model)
    result = apply_program(
        model,
        plan_mesh,
        program,
        src_data_rank=src_data_rank,
        autocast=autocast,
        seed=shared_seed(plan_mesh) if draws_of(program) else None,
        diagnostics=warnings,
        proof=proof,
        derived=compiled.given.derived,
        ranks=Ranks(mesh),
    )
    originals.refuse_optimizers(result)
    guard(result, plan_mesh, compare=check_inputs)
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
