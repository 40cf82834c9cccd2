"""Checking and proving a plan for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from shardplan.compiler.automatic import Derive
from shardplan.compiler.early import look_early
from shardplan.compiler.pipeline import at_a_size, look_up
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model
from shardplan.compiler.variants import bind_variants, prove_layouts, prove_stages, wanted_variants
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, variant_name
from shardplan.core.report import Report, Stage, VerifyReport, as_errors, ordered
from shardplan.core.size_bounds import MOST_PROCESSES, MOST_TOKENS, check_count

from .deriving import deriving
from .keywords import AnyMesh, MeshOptions, ModelOptions, PlanOptions, model_of, sizes_of, split_options

if TYPE_CHECKING:
    from shardplan.compiler.overrides import Logits
    from shardplan.core.coverage import Coverage


class Options(ModelOptions, PlanOptions, MeshOptions, total=False):
    """Keyword arguments that say what is checked."""


class CoverageOptions(ModelOptions, PlanOptions, total=False):
    """Keyword arguments of `coverage`."""


def validate(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh | None = None,
    *,
    sequence_parallel: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    layouts: bool = True,
    proof: bool = True,
    quick: bool = False,
    allow_unproven: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    **options: Unpack[Options],
) -> Report:
    """Check a plan against a model, without touching it; every finding at once. The last stage proves it: two training steps
    of the reduced model on simulated ranks, against the same steps unsharded.

    What needs no torch is checked first: errors in the plan itself, and for a checkpoint's folder what its names and
    sizes alone decide. Where there are such errors, torch is not imported and the model not built (`Report.stages`).

    Args:
        model: a module on any device, a transformers configuration, a word as on the command line (a folder or config.json, a
            cached hub id, a model type, `module:callable`), or a `Model` of one of these.
        plan: as for `load_plan`, or "auto" (the built-in plan for the model, else one that is derived as by `init_plan`, with an
            overlay where `sequence_parallel` is True and an expert-parallel section where the mesh has several ep ranks) or "hf"
            (the model's own tp_plan).
        mesh: a DeviceMesh, or sizes by axis, `{"tp": 8, "dp_shard": 4}`; instead of it the keywords `tp`, `dp_shard`,
            `dp_replicate`, `cp`, `ep`, `pp`. Without tp, what holds for every size is checked, the rest at the smallest size above 1
            that the model allows.
        sequence_parallel: check the plan with, or without, its overlay; None checks both.
        seq_len: the sequence length in tokens, to check its divisibility.
        strict: warnings are errors.
        layouts: check the layouts of activations and gradients too, where the structure is right; without it, and so
            without the proof, the check is done sooner and says less.
        proof: prove the plan numerically, where the layouts are right; without it the report says "not proven".
        quick: check only the files of a checkpoint's folder, for which neither torch nor the model's code is
            needed. What they do not decide for certain is a warning that says so.
        allow_unproven: what cannot be proven (a model that cannot be reduced or called, a part that no run reaches) is a
            warning; else it is an error.
        progress: called with what is being done.
        inputs: inputs of the reduced model: a function from a seed to keyword arguments of its `forward`, or
            `module:callable`. For a transformers model it may take the reduced configuration as a second argument. Without
            it they are made from the configuration, and a module of your own is called with token ids.
        reduced: what builds a reduced model of the same structure, a function without arguments or `module:callable`: for a
            module of your own of more than 2 GiB, and for what cannot be reduced otherwise.
        derive: whether "auto" may derive a plan; else a model that no built-in plan is for is refused (SP511).
        settings: numbers of the model's configuration to change, where `model` is a word.
        trust_remote_code: run code that a model's folder brings along, where `model` is a word.

    Raises:
        ValueError: a mesh size or sequence length that is not a positive integer or above its bound; `quick` for what is no checkpoint's folder
            (`compiler.early.NoCheckpoint`).
        TypeError: something that is not a model or not a plan; the same option given twice.
    """
    of_model, of_plan, of_mesh = split_options("validate", options, ModelOptions, PlanOptions, MeshOptions)
    named, sizes = model_of(model, of_model), sizes_of(mesh, of_mesh)
    if seq_len is not None:
        check_count("seq_len", seq_len, MOST_TOKENS)
    report = look_early(named, plan, sizes, sequence_parallel, quick=quick)
    if report.ok and not quick:
        last: Stage = "proof" if layouts and proof else "layouts" if layouts else "structure"
        derive = deriving(named, of_plan, sizes, sequence_parallel=sequence_parallel, progress=progress)
        report = _look(report, named, plan, derive, sequence_parallel, seq_len, last, allow_unproven, progress)
    findings = ordered(report.diagnostics, report.sources)
    return replace(report, diagnostics=as_errors(findings) if strict else findings)


def _look(
    report: Report,
    model: Model,
    plan: AnyPlan,
    derive: Derive | None,
    sequence_parallel: bool | None,
    seq_len: int | None,
    last: Stage,
    allow_unproven: bool,
    progress: Callable[[str], None],
) -> Report:
    """Look at the model itself, up to the stage `last`; `report` is of what was looked at before."""
    from shardplan.compiler.layout import ModelLayouts

    sizes = report.sizes
    assert sizes is not None  # `look_early` was given them
    given = look_up(model, plan, split=sizes.splits_layers, derive=derive)
    report = replace(report, sources=given.sources, diagnostics=given.findings, derived=given.derived)
    if given.found is None or given.plan is None:
        return report
    wanted = wanted_variants(given.plan, sequence_parallel, sizes)
    variants, allowed = at_a_size(given, sizes, wanted, seq_len=seq_len)
    report = replace(
        report,
        stages=(*report.stages, "structure"),
        checked_tp=next(iter(variants.resolved.values())).sizes.tp,
        variants=tuple(map(variant_name, wanted)),
        allowed_tp=allowed,
    )
    if last != "structure" and not variants.any_error:
        progress("checking layouts")
        reduced_model = ModelLayouts(given.found, report.checked_tp or 1, sizes.ep, pp=sizes.pp)
        variants = prove_layouts(variants, given.plan, reduced_model, allow_unproven=allow_unproven)
        report = replace(report, stages=(*report.stages, "layouts") if variants.layouts else report.stages)
        report = replace(report, allowed_tp=variants.allowed(allowed))
        variants, staged = prove_stages(variants, given.plan, reduced_model, allow_unproven=allow_unproven)
        provable = last == "proof" and reduced_model.runs
        if provable and reduced_model.tp > 1 and variants.layouts and not variants.any_error:
            from shardplan.proof.stage import Question, prove_stage

            asked = Question(reduced_model, model, given.plan, allow_unproven=allow_unproven)
            proven, about = prove_stage(asked, tuple(variants.resolved), progress)
            variants = variants.with_findings(about)
            report = replace(report, stages=(*report.stages, "proof"), proof=proven)
        if provable and sizes.pp > 1 and staged is not None and not variants.any_error:
            from shardplan.proof.prove_stages import with_pipeline

            progress(f"pp={sizes.pp}: comparing the stages with the whole model")
            whole = report.proof or VerifyReport(model.shown, given.plan.name, sizes, ())
            whole, wrong = with_pipeline(whole, reduced_model, staged)
            variants = variants.with_findings(dict.fromkeys(variants.findings, wrong))
            stages = tuple(dict.fromkeys((*report.stages, "proof")))
            report = replace(report, stages=stages, proof=whole)
    return replace(
        report,
        diagnostics=(*given.findings, *variants.all_findings),
        secondary=ordered(variants.secondary, given.sources),
    )


def coverage(
    model: AnyModel,
    plan: AnyPlan = "auto",
    **options: Unpack[CoverageOptions],
) -> Coverage:
    """What a plan splits of a model, what stays whole on every rank, and the tp sizes that both allow; nothing is proven.

    Args:
        model, plan, derive, inputs, reduced, settings, trust_remote_code: as for `validate`.

    Raises:
        PlanError: the model cannot be found, or the plan does not bind to it.
    """
    from shardplan.compiler.check import allowed_tp
    from shardplan.compiler.lower import split_parameters
    from shardplan.core.coverage import Coverage, covered
    from shardplan.report.errors import raise_errors

    of_model, of_plan = split_options("coverage", options, ModelOptions, PlanOptions)
    named = model_of(model, of_model)
    given = look_up(named, plan, derive=deriving(named, of_plan, MeshSizes(), sequence_parallel=False))
    raise_errors(given.findings, given.sources)
    found, read = given.both
    bound = bind_variants(read, found.tree, MeshSizes(), wanted_variants(read, None, MeshSizes()))
    raise_errors(bound.all_findings, given.sources)
    split, whole = covered(found.tree, split_parameters(bound.resolved[NO_OVERLAYS]))
    allowed = {variant_name(on): allowed_tp(resolved) for on, resolved in bound.resolved.items()}
    return Coverage(given.model.shown, read.name, allowed, split, whole)


def verify(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh | None = None,
    *,
    sequence_parallel: bool | None = None,
    logits: Logits = "plan",
    processes: bool = False,
    schedule: str | None = None,
    micro_batches: int | None = None,
    allow_unproven: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    **options: Unpack[Options],
) -> VerifyReport:
    """Prove a plan numerically: two training steps of a reduced model, sharded, against the same steps unsharded - every
    output, every gradient and every buffer, on every rank.

    Args:
        model, plan, mesh: as for `validate`; a size of tp is needed, or several pp ranks: the stages of the reduced model run one
            after the other.
        sequence_parallel: with or without the overlay; None proves both where the plan has one.
        processes: real gloo processes instead of a simulation in this one; needed where dp_shard or dp_replicate is
            above 1. With several pp ranks they run a pipeline's schedule.
        schedule, micro_batches: of that pipeline; None: 1f1b, and twice as many as it has stages.
        allow_unproven, derive, inputs, reduced, settings, trust_remote_code: as for `validate`.
        progress: called with what is being done.

    Raises:
        PlanError: the plan has errors; no reduced model can be made, or the sharded one does not run.
        ValueError: data parallelism without `processes`; more processes than one machine runs; a schedule that does not fit.
    """
    from shardplan.compiler.layout import ModelLayouts
    from shardplan.proof.pipelined import schedule_of_call, scheduled_for
    from shardplan.proof.prove import prove
    from shardplan.proof.prove_stages import with_pipeline
    from shardplan.report.errors import raise_errors
    from shardplan.runtime.pipeline.layout_of_stages import stage_sizes

    of_model, of_plan, of_mesh = split_options("verify", options, ModelOptions, PlanOptions, MeshOptions)
    named, sizes = model_of(model, of_model), sizes_of(mesh, of_mesh)
    if sizes.tp is None and sizes.pp > 1:
        sizes = replace(sizes, tp=1)
    if sizes.tp is None:
        raise TypeError("verify needs a tp size, or several pp ranks")
    if processes and sizes.world_size > MOST_PROCESSES:
        raise ValueError(
            f"at most {MOST_PROCESSES} processes are started here, not {sizes.world_size}: use a smaller mesh"
        )
    record = schedule_of_call(schedule, micro_batches, processes=processes, pp=sizes.pp)
    if sizes.world_size > sizes.tp * sizes.pp and not processes:
        raise ValueError("FSDP2 does not run in the simulation: pass processes=True (--processes)")
    if sizes.ep not in (1, sizes.tp) and not processes:
        raise ValueError(
            "the simulation has the ranks of tp alone: an ep other than tp needs processes=True (--processes)"
        )
    derive = deriving(named, of_plan, sizes, sequence_parallel=sequence_parallel, progress=progress)
    given = look_up(named, plan, split=sizes.splits_layers, derive=derive)
    raise_errors(given.findings, given.sources)
    found, read = given.both
    wanted = wanted_variants(read, sequence_parallel, sizes)
    variants = given.structure(sizes, wanted)
    raise_errors((*given.findings, *variants.all_findings), given.sources)
    stages = sizes.pp
    if processes and sizes.pp > 1:
        stages = len(stage_sizes(variants.resolved[wanted[0]], record, sizes.pp, None, micro_batches))
    reduced = ModelLayouts(found, sizes.tp, sizes.ep, pp=stages, blocks=stages if processes and sizes.pp > 1 else 0)
    staged, scheduled = None, None
    if sizes.pp > 1:
        variants, staged = prove_stages(variants, read, reduced, allow_unproven=allow_unproven)
        raise_errors(variants.all_findings, given.sources)
        assert staged is not None and staged.ok  # a mesh with pp and a plan without the section is an error
        if processes:
            scheduled = scheduled_for(reduced, staged, record, stages, micro_batches)
    report = VerifyReport(named.shown, read.name, sizes, ())
    split = replace(sizes, pp=1).splits_layers
    if split or sizes.pp == 1 or processes:
        report = prove(
            reduced,
            named,
            read,
            sizes,
            wanted if split or sizes.pp == 1 else wanted[:1],
            logits=logits,
            processes=processes,
            scheduled=scheduled,
            allow_unproven=allow_unproven,
            progress=progress,
        ).report
    if staged is None:
        return report
    progress(f"pp={sizes.pp}: comparing the stages with the whole model")
    return with_pipeline(report, reduced, staged)[0]
