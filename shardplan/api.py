"""The public functions: each is one pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardplan.compiler.early import look_early
from shardplan.compiler.inputs import AnyInputs, AnyPlan, AnyReduced, ModelSource, find_model, plan_name, read_plan
from shardplan.compiler.variants import (
    Variants,
    any_error,
    bind_variants,
    check_variants,
    prove_layouts,
    wanted_variants,
)
from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Plan, PlanFile
from shardplan.core.report import Report, Stage, VerifyReport, as_errors, ordered, variant_name
from shardplan.core.sources import SourceMap

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardplan.apply import Applied
    from shardplan.compiler.inputs import AnyModel
    from shardplan.compiler.overrides import Logits, Override
    from shardplan.core.coverage import Coverage
    from shardplan.core.estimate import Device, Estimate, OptimizerName, Precision, Sweep
    from shardplan.lower import Program
    from shardplan.models import FoundModel
    from shardplan.proof.stage import Question
    from shardplan.synth.foreign.sources import Form
    from shardplan.synth.new import NewPlan


def load_plan(plan: AnyPlan) -> Plan:
    """Read a plan, without a model.

    Args:
        plan: a file (a word with a path separator or a .yaml, .yml or .json ending), a built-in plan's name, or the
            plan's content as a dict.

    Raises:
        PlanError: the plan has errors; all of them.
        ValueError: for "auto" and "hf", which need a model.
    """
    from shardplan.parse import parse_plan
    from shardplan.render import text

    if isinstance(plan, Plan):
        return plan
    if plan in ("auto", "hf"):
        raise ValueError(f"the plan {plan!r} depends on the model: give it to validate, verify or apply_plan")
    parsed = parse_plan(plan)
    if parsed.plan is None or any(d.is_error for d in parsed.diagnostics):
        raise PlanError(parsed.diagnostics, text(parsed.diagnostics, parsed.sources, color=False))
    return Plan(parsed.plan, parsed.sources, parsed.diagnostics)


def validate(
    model: AnyModel,
    plan: AnyPlan,
    *,
    tp: int | None = None,
    dp_shard: int = 1,
    dp_replicate: int = 1,
    cp: int = 1,
    sequence_parallel: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    layouts: bool = True,
    proof: bool = True,
    quick: bool = False,
    allow_unproven: bool = False,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check a plan against a model, without touching it; every finding at once. The last stage proves it: two training steps
    of the reduced model on simulated ranks, against the same steps unsharded.

    What can be told without torch is told first: errors in the plan itself, and for a checkpoint's folder what its names and
    sizes alone decide. Where there are such errors, torch is not imported and the model not built (`Report.stages`).

    Args:
        model: a module on any device, a transformers configuration, or a word as on the command line: a folder or
            config.json, a cached hub id, a model type, `module:callable`.
        plan: as for `load_plan`, or "auto" (the built-in plan for the model) or "hf" (the model's own tp_plan).
        tp, dp_shard, dp_replicate, cp: mesh sizes. Without `tp`, what holds for every size is checked, the rest at
            the smallest size above 1 that the model allows.
        sequence_parallel: check the plan with, or without, its overlay; None checks both.
        seq_len: the sequence length in tokens, to check its divisibility.
        strict: warnings are errors.
        layouts: check the layouts of activations and gradients too, where the structure is right; without it, and so
            without the proof, the check is done sooner and says less.
        proof: prove the plan numerically, where the layouts are right; without it the report says "not proven".
        quick: stop behind what the files of a checkpoint's folder tell, for which neither torch nor the model's code is
            needed. What they do not decide for certain is a warning that says so.
        allow_unproven: what cannot be proven (a model that cannot be reduced or called, a part that no run reaches) is a
            warning; else it is an error.
        inputs: what to call the reduced model with: a function from a seed to keyword arguments of its `forward`, or
            `module:callable`. For a transformers model it may take the reduced configuration as a second argument. Without
            it they are made from the configuration, and a module of your own is called with token ids.
        reduced: what builds a small model of the same structure, a function without arguments or `module:callable`: for a
            module of your own of more than 2 GiB, and for what cannot be reduced otherwise.
        settings: numbers of the model's configuration to change, where `model` is a word.
        trust_remote_code: run code that a model's folder brings along, where `model` is a word.
        progress: is told what is being done.

    Raises:
        ValueError: a mesh size that is not a positive integer; `quick` for what is no checkpoint's folder
            (`compiler.early.NoCheckpoint`).
        TypeError: something that is no model or no plan.
    """
    sizes = MeshSizes(tp=tp, dp_shard=dp_shard, dp_replicate=dp_replicate, cp=cp)
    source = ModelSource(model, settings or {}, trust_remote_code, inputs, reduced)
    report = look_early(source, plan, sizes, sequence_parallel, quick=quick)
    if report.ok and not quick:
        last = "proof" if layouts and proof else "layouts" if layouts else "structure"
        report = _look(report, source, plan, sequence_parallel, seq_len, last, allow_unproven, progress)
    findings = ordered(report.diagnostics, report.sources)
    return replace(report, diagnostics=as_errors(findings) if strict else findings)


def _look(
    report: Report,
    source: ModelSource,
    plan: AnyPlan,
    sequence_parallel: bool | None,
    seq_len: int | None,
    last: Stage,
    allow_unproven: bool,
    progress: Callable[[str], None],
) -> Report:
    """Look at the model itself, up to the stage `last`; `report` is of what was looked at before."""
    from shardplan.layout import ModelLayouts

    found, about_model = find_model(source)
    read, sources, about_plan = read_plan(plan, found)
    findings = [*about_model, *about_plan]
    report = replace(report, sources=sources)
    if found is not None and read is not None:
        report, variants = _check(report, read, found, sequence_parallel, seq_len)
        report = replace(report, stages=(*report.stages, "structure"))
        if last != "structure" and not variants.any_error:
            progress("checking layouts")
            small = ModelLayouts(found, report.checked_tp or 1)
            variants = prove_layouts(variants, read, small, allow_unproven=allow_unproven)
            report = replace(report, stages=(*report.stages, *(["layouts"] if variants.layouts else [])))
            report = replace(report, allowed_tp=variants.allowed(report.allowed_tp or ()))
            if last == "proof" and variants.layouts and small.runs and not variants.any_error:
                from shardplan.proof.stage import Question, prove_stage

                asked = Question(small, source, read, allow_unproven=allow_unproven)
                proven, about = prove_stage(asked, tuple(variants.resolved), progress)
                variants = variants.with_findings(about)
                report = replace(report, stages=(*report.stages, "proof"), proof=proven)
        findings += variants.together
        report = replace(report, secondary=ordered(variants.secondary, sources))
    return replace(report, diagnostics=tuple(findings))


def _check(
    report: Report, plan: PlanFile, found: FoundModel, sequence_parallel: bool | None, seq_len: int | None
) -> tuple[Report, Variants]:
    """Bind the variants and check their structure, all at one tp size."""
    from shardplan.check import allowed_tp

    bound = bind_variants(plan, found.tree, report.sizes, wanted_variants(plan, sequence_parallel))
    allowed = set.intersection(*(set(allowed_tp(resolved)) for resolved in bound.resolved.values()))
    tp = report.sizes.tp or min((size for size in allowed if size > 1), default=None)
    names = tuple(variant_name(on) for on in bound.resolved)
    report = replace(report, checked_tp=tp, variants=names, allowed_tp=tuple(sorted(allowed)))
    return report, check_variants(bound.at(tp), seq_len=seq_len)


def coverage(
    model: AnyModel,
    plan: AnyPlan = "auto",
    *,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Coverage:
    """What a plan splits of a model, what stays whole on every rank, and the tp sizes that both allow; nothing is proven.

    Args:
        model, plan, settings, trust_remote_code: as for `validate`.

    Raises:
        PlanError: the model cannot be found, or the plan does not bind to it.
    """
    from shardplan.check import allowed_tp
    from shardplan.core.coverage import Coverage, covered
    from shardplan.lower import split_parameters

    source = ModelSource(model, settings or {}, trust_remote_code)
    found, about_model = find_model(source)
    read, sources, about_plan = read_plan(plan, found)
    _raise_errors((*about_model, *about_plan), sources, strict=False)
    bound = bind_variants(read, found.tree, MeshSizes(), wanted_variants(read, None))
    _raise_errors(bound.together, sources, strict=False)
    split, whole = covered(found.tree, split_parameters(bound.resolved[False]))
    allowed = {variant_name(on): allowed_tp(resolved) for on, resolved in bound.resolved.items()}
    return Coverage(source.name, read.name, allowed, split, whole)


def init_plan(
    model: AnyModel,
    *,
    tp: int = 2,
    sequence_parallel: bool = False,
    name: str | None = None,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> NewPlan:
    """Write a plan for a model, from its structure and a run of a small copy of it; validated and proven numerically.

    What cannot be split stays whole, and the plan says so; the result's `diagnostics` too, with what keeps the model itself
    from being trained with any plan (its dropout).

    Args:
        model: as for `validate`.
        tp: the size for which rules are tried and the plan is proven; `validate` tells which others the model allows.
        sequence_parallel: with a sequence-parallel section.
        name: of the plan; None is the model's type.
        inputs, reduced, settings, trust_remote_code: as for `validate`.
        progress: is told what is being done.

    Raises:
        PlanError: the model cannot be found or run; nothing can be split (SP530); an overlay is wanted and none is found
            (SP531).
        ValueError: a tp size below 2.
    """
    from shardplan.layout import ModelLayouts
    from shardplan.parse import parse_plan
    from shardplan.proof.stage import Question, prove_stage
    from shardplan.synth.new import new_plan

    if tp < 2:
        raise ValueError(f"tp is {tp}: a plan is tried at a size of 2 or more")
    source = ModelSource(model, settings or {}, trust_remote_code, inputs, reduced)
    found, about_model = find_model(source)
    _raise_errors(about_model, SourceMap(), strict=False)
    made = new_plan(found, tp=tp, sequence_parallel=sequence_parallel, name=name, progress=progress)
    parsed = parse_plan(dict(made.document), name="init")
    assert parsed.plan is not None, made.text
    progress("validating")
    sizes = MeshSizes(tp=tp)
    wanted = wanted_variants(parsed.plan, None)
    variants = check_variants(bind_variants(parsed.plan, found.tree, sizes, wanted))
    about_rules = [d for d in variants.together if d.primary is not None]
    _raise_errors(about_rules, parsed.sources, strict=False)
    small = ModelLayouts(found, tp)
    layouts = prove_layouts(replace(variants, findings=dict.fromkeys(variants.findings, ())), parsed.plan, small)
    _raise_errors(layouts.together, parsed.sources, strict=False)
    asked = Question(small, source, parsed.plan, allow_unproven=True)  # what no run reaches is said, and stays whole
    proof, about_proof = prove_stage(asked, wanted, progress)
    assert proof is not None and proof.ok, f"the plan that was found is refuted:\n{made.text}"
    found_late = layouts.with_findings(about_proof).together
    # What keeps the model itself from being split, whatever the plan (its dropout), does not keep a plan from being written.
    about_model = [replace(d, severity=Severity.WARNING) for d in variants.together if d.primary is None]
    return replace(made, diagnostics=(*made.diagnostics, *about_model, *found_late))


@dataclass(frozen=True, slots=True)
class ConvertedPlan:
    """What `convert_plan` returns.

    Args:
        text: the plan file, YAML; None where an entry of the source has no counterpart.
        document: the same as data.
        report: what cannot be said, is left out or was added, and with a model what `validate` says of the plan.
    """

    text: str | None
    document: Mapping[str, Any] | None
    report: Report

    @property
    def ok(self) -> bool:
        """Whether there is a plan, and no error."""
        return self.text is not None and self.report.ok


def convert_plan(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    model: AnyModel | None = None,
    form: Form | None = None,
    import_path: str | None = None,
    name: str | None = None,
    tp: int | None = None,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    shown_as: str = "<converted>",
) -> ConvertedPlan:
    """Write a plan that says what a plan of transformers, NeMo Automodel, NeMo-RL, torch or DeepSpeed says.

    Nothing is guessed: an entry that no rule of ours means is an error, and no plan is written then.

    Args:
        source: a JSON or YAML file; a dictionary from names to style names or `ParallelStyle` objects, or a DeepSpeed
            config; or "hf", the plan that transformers has for the model.
        model: as for `validate`: names and kinds of modules are looked up in it, and the plan is validated. Some entries
            cannot be understood without it (SP544).
        form: "transformers", "automodel", "torch" or "deepspeed"; None: told by the source's form.
        import_path: in place of a source, `module:name` of a dictionary of styles or of a function that returns one. The
            module is imported and its code run, which nothing else does.
        name: of the plan; None: the model's type, or the source's name.
        tp: a size to validate at; None: as for `validate`.
        inputs, reduced, settings, trust_remote_code: as for `validate`.
        shown_as: what findings call the plan's file.

    Raises:
        ValueError: neither a source nor an import path, or both; a form that there is none of; a tp size below 1.
        TypeError: a source that is neither a file nor a dictionary.
    """
    from shardplan.parse.parsing import parse_text
    from shardplan.synth.foreign.convert import convert
    from shardplan.synth.foreign.sources import FORMS

    if (source is None) == (import_path is None):
        raise ValueError("give a source or an import path, one of both")
    if form is not None and form not in FORMS:
        raise ValueError(f"there is no form {form!r}: the forms are {', '.join(FORMS)}")
    found, about_model = None, ()
    if model is not None:
        wanted = ModelSource(model, settings or {}, trust_remote_code, inputs, reduced)
        found, about_model = find_model(wanted)
        if found is None:
            return ConvertedPlan(None, None, Report(diagnostics=about_model, model=wanted.name))
    made = convert(source, form=form, import_path=import_path, found=found, name=name)
    if made.text is None:
        findings = ordered(made.diagnostics, made.sources)
        return ConvertedPlan(None, None, Report(diagnostics=findings, sources=made.sources))
    parsed = parse_text(made.text, file=shown_as)
    report = Report(diagnostics=parsed.diagnostics, plans=(shown_as,))
    if parsed.plan is not None and model is not None:
        plan = Plan(parsed.plan, parsed.sources, parsed.diagnostics)
        options = {"settings": settings, "inputs": inputs, "reduced": reduced, "trust_remote_code": trust_remote_code}
        report = validate(model, plan, tp=tp, **options)
    sources = SourceMap({**made.sources.files, **parsed.sources.files})
    findings = ordered((*made.diagnostics, *report.diagnostics), sources)
    return ConvertedPlan(made.text, made.document, replace(report, diagnostics=findings, sources=sources))


def compile_plan(
    model: AnyModel,
    mesh: DeviceMesh | MeshSizes,
    plan: AnyPlan,
    *,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    compile: Override = None,
    regather: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    allow_unproven: bool = False,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Program:
    """Compile a plan for a model, without touching it. Deterministic, and equal on all ranks. Its layouts are checked;
    `validate` and `apply_plan` prove it numerically too.

    Args:
        model, plan: as for `validate`.
        mesh: a DeviceMesh with axis names, or the sizes alone.
        sequence_parallel: lay the plan's overlay over it; with tp 1 there is nothing to split.
        logits: "plan", or the output head with whole ("replicated") or vocabulary-split ("sharded") logits.
        data_parallel, activation_checkpointing, compile: a mapping overrides fields of the plan's section, False
            leaves the section out, True takes its defaults (on the plan's data-parallel units, wrapped or not), None is as
            the plan says.
        regather: whether what is gathered along the sequence is gathered again in backward instead of being kept; None is as
            the plan says.
        seq_len: the sequence length in tokens, to check its divisibility.
        strict: warnings are errors.
        allow_unproven, inputs, reduced, settings, trust_remote_code: as for `validate`.

    Raises:
        PlanError: all that `validate` can tell before its last stage.
        TypeError, ValueError: a wrong argument.
    """
    return _compile(
        ModelSource(model, settings or {}, trust_remote_code, inputs, reduced),
        _sizes(mesh),
        plan,
        sequence_parallel=sequence_parallel,
        logits=logits,
        sections={
            "data_parallel": data_parallel,
            "activation_checkpointing": activation_checkpointing,
            "compile": compile,
        },
        regather=regather,
        seq_len=seq_len,
        strict=strict,
        allow_unproven=allow_unproven,
    ).program


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: AnyPlan,
    *,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    compile: Override = None,
    regather: bool | None = None,
    seq_len: int | None = None,
    strict: bool = False,
    prove: bool = True,
    allow_unproven: bool = False,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    axes: Mapping[str, str] | None = None,
    check_inputs: bool = False,
    src_data_rank: int | None = 0,
    autocast_dtype: torch.dtype | str | None = None,
    patch_is_packed_sequence: bool = False,
) -> nn.Module:
    """Shard a model as a plan says: tensor and sequence parallelism, ties, activation checkpointing, compile, FSDP2.

    The model is changed in place and returned (with the backend ddp, its wrapper). Names of modules and parameters
    stay. Make the optimizer afterwards.

    Args:
        model: on the meta device, the CPU or a CUDA device, not sharded yet.
        mesh: a DeviceMesh with axis names: `tp` and any of `dp_replicate`, `dp_shard`, `cp` (other common spellings are
            understood). Without tp there is no tensor parallelism, without dp_shard no data parallelism.
        plan, sequence_parallel, logits, data_parallel, activation_checkpointing, compile, regather, seq_len, strict,
        allow_unproven, inputs, reduced: as for `compile_plan`.
        prove: prove the plan numerically on the mesh's first rank before anything is sharded, unless this process has proven
            it before (`validate`). Without it, `applied(model)` says "not proven".
        axes: axis -> the mesh's name for it, where it is none of the known spellings.
        check_inputs: at the first step, compare ids and masks over tp and name the ranks that were fed another batch.
        src_data_rank: the tp rank whose weights count; None: every rank has the same weights, send nothing.
        autocast_dtype: run the model's forward under torch.autocast in this dtype, bfloat16 or float16.
        patch_is_packed_sequence: keep transformers' flash attention from looking for packed sequences in every layer,
            which makes the device wait; in this process, with a warning, and an error for packed inputs.

    Raises:
        PlanError: all that `validate` can tell; the model is untouched.
        ValueError, TypeError: a wrong argument, a model that is sharded already; the model is untouched.
        RuntimeError: ranks compiled different programs (untouched), or a step failed (the model is unusable then).
    """
    from shardplan.apply.agreement import check_inputs_once, intention, same_on_all_ranks
    from shardplan.apply.apply import apply_program, refuse_used
    from shardplan.apply.autocast import read_dtype
    from shardplan.apply.mesh import read_mesh
    from shardplan.models.packed import patch_is_packed_sequence as patch_packed
    from shardplan.proof.stage import prove_on_first_rank

    refuse_used(model)
    plan_mesh = read_mesh(mesh, axes)
    with same_on_all_ranks(mesh) as say:
        compiled = _compile(
            ModelSource(model, inputs=inputs, reduced=reduced),
            plan_mesh.sizes,
            plan,
            sequence_parallel=sequence_parallel,
            logits=logits,
            sections={
                "data_parallel": data_parallel,
                "activation_checkpointing": activation_checkpointing,
                "compile": compile,
            },
            regather=regather,
            seq_len=seq_len,
            strict=strict,
            allow_unproven=allow_unproven,
        )
        program, warnings = compiled.program, compiled.warnings
        plan_mesh.check_sections(program.resolved)
        autocast = read_dtype(autocast_dtype, program.resolved.data_parallel)
        say(f"{intention(program)}\nautocast {autocast}")
    proof = "not proven: nothing is split" if plan_mesh.sizes.tp == 1 else "not proven: it cannot be (allow_unproven)"
    if not prove:
        proof = "not proven: prove=False"
    elif compiled.asked is not None:
        found, how = prove_on_first_rank(compiled.asked, program.sequence_parallel, mesh)
        _raise_errors(found, compiled.sources, strict=strict)
        warnings, proof = (*warnings, *found), f"proven {how}, on a reduced model"
    result = apply_program(
        model, plan_mesh, program, src_data_rank=src_data_rank, autocast=autocast, diagnostics=warnings, proof=proof
    )
    if patch_is_packed_sequence:
        patch_packed()
    if check_inputs and plan_mesh.tp is not None:
        check_inputs_once(result, plan_mesh.tp)
    return result


def verify(
    model: AnyModel,
    plan: AnyPlan,
    *,
    tp: int,
    dp_shard: int = 1,
    dp_replicate: int = 1,
    sequence_parallel: bool | None = None,
    logits: Logits = "plan",
    processes: bool = False,
    allow_unproven: bool = False,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Prove a plan numerically: two training steps of a reduced model, sharded, against the same steps unsharded - every
    output, every gradient and every buffer, on every rank.

    Args:
        model, plan: as for `validate`.
        tp, dp_shard, dp_replicate: mesh sizes.
        sequence_parallel: with or without the overlay; None proves both where the plan has one.
        processes: real gloo processes instead of a simulation in this one; needed where dp_shard or dp_replicate is
            above 1.
        allow_unproven, inputs, reduced, settings, trust_remote_code: as for `validate`.
        progress: is told what is being done.

    Raises:
        PlanError: the plan has errors; no reduced model can be made, or the sharded one does not run.
        ValueError: data parallelism without `processes`.
    """
    from shardplan.layout import ModelLayouts
    from shardplan.proof.prove import prove

    sizes = MeshSizes(tp=tp, dp_shard=dp_shard, dp_replicate=dp_replicate)
    if sizes.world_size > tp and not processes:
        raise ValueError("FSDP2 does not run in the simulation: pass processes=True (--processes)")
    source = ModelSource(model, dict(settings or {}), trust_remote_code, inputs, reduced)
    found, about_model = find_model(source)
    read, sources, about_plan = read_plan(plan, found)
    _raise_errors((*about_model, *about_plan), sources, strict=False)
    wanted = wanted_variants(read, sequence_parallel)
    variants = check_variants(bind_variants(read, found.tree, sizes, wanted))
    _raise_errors((*about_model, *about_plan, *variants.together), sources, strict=False)
    options = {"logits": logits, "processes": processes, "allow_unproven": allow_unproven, "progress": progress}
    return prove(ModelLayouts(found, tp), source, read, sizes, wanted, **options).report


def estimate(
    model: AnyModel,
    plan: AnyPlan,
    mesh: Mapping[str, int] | MeshSizes,
    *,
    seq_len: int,
    micro_batch: int = 1,
    precision: Precision = "bf16",
    optimizer: OptimizerName = "adamw",
    device: Device | str | None = None,
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    regather: bool | None = None,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Estimate:
    """What a training step of a planned model costs each rank, without memory and without a device: bytes, floating point
    operations, communication and, for a device, the least time. A few layers are traced and the rest extrapolated.

    Args:
        model, plan: as for `validate`.
        mesh: sizes by axis: `tp`, `dp_shard`, `dp_replicate`.
        seq_len: tokens of a sequence.
        micro_batch: sequences that a data-parallel rank takes at once.
        precision: in what parameters, gradients and optimizer state are stored: "bf16", "fp16", "fp32". What is computed
            in follows from it and from the plan's mixed_precision.
        optimizer: "adamw" or "sgd" (torch's, called without options), or "none".
        device: the name of a device ("h200"), a JSON file that describes one, or a Device; None asks for no time.
        sequence_parallel, logits, data_parallel, activation_checkpointing, regather: as for `apply_plan`.
        inputs, reduced, settings, trust_remote_code: as for `validate`. A module with inputs of its own is called with these,
            whatever `seq_len` and `micro_batch` are.
        progress: is told what is being done.

    Raises:
        PlanError: all that `validate` can tell; a step of the model cannot be traced (SP560).
        ValueError: a wrong size, word or device; cp, or a data-parallel backend other than fsdp2; a process group exists.
    """
    from shardplan.costs.asked import read_sizes

    (made,) = _estimates(
        ModelSource(model, settings or {}, trust_remote_code, inputs, reduced),
        plan,
        [read_sizes(mesh)],
        device=device,
        seq_len=seq_len,
        micro_batch=micro_batch,
        precision=precision,
        optimizer=optimizer,
        sequence_parallel=sequence_parallel,
        logits=logits,
        sections={"data_parallel": data_parallel, "activation_checkpointing": activation_checkpointing},
        regather=regather,
        progress=progress,
    )
    if isinstance(made, PlanError):
        raise made
    return made


def sweep(
    model: AnyModel,
    plan: AnyPlan,
    gpus: int,
    *,
    device: Device | str,
    seq_len: int,
    micro_batch: int = 1,
    precision: Precision = "bf16",
    optimizer: OptimizerName = "adamw",
    sequence_parallel: bool = False,
    logits: Logits = "plan",
    data_parallel: Override = None,
    activation_checkpointing: Override = None,
    regather: bool | None = None,
    inputs: AnyInputs | None = None,
    reduced: AnyReduced | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """The estimate of every mesh for a number of devices: dp_replicate x dp_shard x tp.

    Args:
        gpus: how many devices.
        sequence_parallel: with the plan's overlay, where tp is above 1.
        model, plan and all others: as for `estimate`.

    Raises:
        PlanError: no mesh can be estimated.
        ValueError: as for `estimate`.
    """
    from shardplan.core.estimate import Sweep
    from shardplan.costs.meshes import in_order, meshes_of

    meshes = meshes_of(gpus)
    made = _estimates(
        ModelSource(model, settings or {}, trust_remote_code, inputs, reduced),
        plan,
        meshes,
        device=device,
        seq_len=seq_len,
        micro_batch=micro_batch,
        precision=precision,
        optimizer=optimizer,
        sequence_parallel=sequence_parallel,
        logits=logits,
        sections={"data_parallel": data_parallel, "activation_checkpointing": activation_checkpointing},
        regather=regather,
        progress=progress,
    )
    errors = {sizes: one for sizes, one in zip(meshes, made, strict=True) if isinstance(one, PlanError)}
    if len(errors) == len(meshes):
        raise errors[meshes[0]]
    first = ((sizes, next(d for d in error.diagnostics if d.is_error)) for sizes, error in errors.items())
    reasons = ((sizes, " ".join((d.message, *(f"({note})" for note in d.notes[:1])))) for sizes, d in first)
    return Sweep(gpus, in_order(one for one in made if not isinstance(one, PlanError)), tuple(reasons))


def _estimates(
    source: ModelSource,
    plan: AnyPlan,
    meshes: Iterable[MeshSizes],
    *,
    device: Device | str | None,
    seq_len: int,
    micro_batch: int,
    precision: Precision,
    optimizer: OptimizerName,
    sequence_parallel: bool,
    logits: Logits,
    sections: Mapping[str, Override],
    regather: bool | None,
    progress: Callable[[str], None],
) -> list[Estimate | PlanError]:
    """The estimate of each mesh, or why there is none. The plan is compiled once for each size of the tp axis."""
    from shardplan.check import check
    from shardplan.core.estimate import Question
    from shardplan.costs.asked import check_question
    from shardplan.costs.devices import read_device
    from shardplan.costs.estimate import estimate_mesh

    asked = Question(source.name, plan_name(plan), sequence_parallel, seq_len, micro_batch, precision, optimizer)
    check_question(asked)
    known = read_device(device) if isinstance(device, str) else device
    found: FoundModel | None = None
    programs: dict[int | None, Program] = {}
    made: list[Estimate | PlanError] = []
    for sizes in meshes:
        try:
            if sizes.tp not in programs:
                progress(f"compiling for tp {sizes.tp}")
                options = {"sequence_parallel": sequence_parallel, "logits": logits, "regather": regather}
                made_of = {"sections": sections, "seq_len": seq_len, "strict": False, "allow_unproven": True}
                programs[sizes.tp] = _compile(source, sizes, plan, **options, **made_of).program
            resolved = replace(programs[sizes.tp].resolved, sizes=sizes)
            _raise_errors(check(resolved, seq_len=seq_len), SourceMap(), strict=False)
            found = found or source.find()
            made.append(estimate_mesh(found, replace(programs[sizes.tp], resolved=resolved), asked, known, progress))
        except PlanError as error:
            made.append(error)
    return made


def applied(model: nn.Module) -> Applied:
    """What `apply_plan` did to a model: its program, warnings, steps and expected collectives; printable.

    Raises:
        ValueError: no plan was applied to it, or applying one failed half-way.
    """
    from shardplan.apply import applied as lookup

    return lookup(model)


@dataclass(frozen=True)
class Compiled:
    """A program, with the warnings met on the way, and what its proof needs; None where there is nothing to prove, or nothing
    to prove it on."""

    program: Program
    warnings: tuple[Diagnostic, ...]
    asked: Question | None
    sources: SourceMap


def _compile(
    source: ModelSource,
    sizes: MeshSizes,
    plan: AnyPlan,
    *,
    sequence_parallel: bool,
    logits: Logits,
    sections: Mapping[str, Override],
    regather: bool | None,
    seq_len: int | None,
    strict: bool,
    allow_unproven: bool = False,
) -> Compiled:
    from shardplan.compiler.overrides import overriding_document, with_parent
    from shardplan.compiler.program import program_of
    from shardplan.layout import ModelLayouts
    from shardplan.parse import parse_plan
    from shardplan.proof.stage import Question

    found, about_model = find_model(source)
    read, sources, about_plan = read_plan(plan, found)
    findings = [*about_model, *about_plan]
    if (document := overriding_document(sections)) is not None:
        over = parse_plan(document, name="<arguments>")
        findings += over.diagnostics
        sources = SourceMap({**sources.files, **over.sources.files})
        read = with_parent(over.plan, read) if over.plan and read else None
    _raise_errors(findings, sources, strict=strict)
    overlay = sequence_parallel and sizes.tp != 1
    variants = check_variants(bind_variants(read, found.tree, sizes, {False, overlay}), seq_len=seq_len)
    _raise_errors([*findings, *variants.findings[overlay]], sources, strict=strict)
    small = ModelLayouts(found, sizes.tp or 1)
    variants = prove_layouts(variants, read, small, allow_unproven=allow_unproven)
    findings += variants.findings[overlay]
    _raise_errors(findings, sources, strict=strict)
    program = program_of(variants, overlay, logits=logits, regather=regather, sections=sections)
    provable = bool(variants.layouts) and small.runs
    asked = Question(small, source, read, logits, allow_unproven) if provable else None
    return Compiled(program, tuple(findings), asked, sources)


def _raise_errors(findings: Iterable[Diagnostic], sources: SourceMap, *, strict: bool) -> None:
    from shardplan.render import text

    findings = ordered(as_errors(findings) if strict else findings, sources)
    if any_error(findings):
        raise PlanError(findings, text(findings, sources, color=False))


def _sizes(mesh: DeviceMesh | MeshSizes) -> MeshSizes:
    from shardplan.apply.mesh import read_mesh

    return mesh if isinstance(mesh, MeshSizes) else read_mesh(mesh).sizes
