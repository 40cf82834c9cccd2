"""Checking and proving a plan for a model."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardplan.compiler.check import allowed_tp
from shardplan.compiler.early import look_early
from shardplan.compiler.pipeline import Given, at_a_size, look_up
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model
from shardplan.compiler.variants import Variants, any_error, bind_variants, prove_layouts, prove_stages, wanted_variants
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import BESIDE_TP, NO_OVERLAYS, Overlays, overlays_of, variant_name
from shardplan.core.report import NumericProof, Report, Stage, as_errors, ordered
from shardplan.core.size_bounds import MOST_PROCESSES, MOST_TOKENS, check_count
from shardplan.core.suggest import with_known_names
from shardplan.core.user_files import CannotRead, decode, read_bytes
from shardplan.report.errors import raise_errors

from .deriving import deriving
from .keywords import AnyMesh, model_of, sizes_of
from .one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    from shardplan.compiler.layout.stage_plan import StagedPlan
    from shardplan.compiler.overrides import Logits
    from shardplan.core.coverage import Coverage
    from shardplan.core.schedules import Schedule
    from shardplan.proof.stage import Question


NOTHING = "torch does data parallelism alone, and there is nothing to simulate: pass processes=True (--processes), or a size of tp or ep"


@with_known_names
@one_at_a_time
def validate(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh | None = None,
    *,
    sequence_parallel: bool | None = None,
    seq_len: int | None = None,
    logits: Logits = "plan",
    strict: bool = False,
    layouts: bool = True,
    proof: bool = True,
    quick: bool = False,
    allow_unproven: bool = False,
    derive: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check a plan against a model, without changing the model, and report all findings at once. The last stage is the proof: it
    compares two training steps of the reduced model on simulated ranks with the same steps unsharded.

    Checks that need no torch come first: those of the plan itself and, for a checkpoint's folder, those that need only its
    names and sizes. Where they find errors, torch is not imported and the model is not built (`Report.stages`).

    Args:
        model: a module on any device, a transformers configuration, a name as on the command line (a folder or config.json, a
            cached hub id, a model type, `module:callable`), or a `Model` of one of these.
        plan: as for `load_plan`; or "hf", the model's own tp_plan; or "auto", the built-in plan for the model, else a plan that is
            derived as by `init_plan`. The derived plan has a sequence-parallel section where `sequence_parallel` is True, and an
            expert-parallel section where the mesh has several ep ranks.
        mesh: sizes by axis, `{"tp": 8, "dp_shard": 4}`, or a DeviceMesh. Without tp, checks that depend on its size use the smallest
            size above 1 that the model allows.
        sequence_parallel: check the plan with (True) or without (False) its sequence-parallel section; None checks both.
        seq_len: the sequence length in tokens, whose divisibility is checked.
        logits: the layout of the output head's logits in the proof, as for `apply_plan`.
        strict: treat warnings as errors.
        layouts: also check the layouts of activations and gradients, where the structure is right. Without them there is no
            proof either: the check is faster and finds less.
        proof: prove the plan numerically, where the layouts are right; without it the report says "not proven".
        quick: check only the files of a checkpoint's folder, which needs neither torch nor the model's code. A warning
            names what these files cannot decide.
        allow_unproven: report a warning instead of an error for what cannot be proven (a model that cannot be reduced or
            called, a part that no run reaches).
        progress: called with what is being done.
        derive: let "auto" derive a plan for a model without a built-in one, and rules for cp for a built-in plan on a mesh with several cp
            ranks. If False, the model without a built-in plan is refused (SP511), and so is the plan without rules for cp (SP372).

    Raises:
        ValueError: a mesh size or sequence length that is not a positive integer, or is above its bound; `quick` for a model that
            is not a checkpoint's folder (`compiler.early.NoCheckpoint`).
        TypeError: something that is not a model, not a plan or not a mesh.
    """
    last: Stage = "proof" if layouts and proof else "layouts" if layouts else "structure"
    asked = Check(
        model_of(model),
        plan,
        sizes_of(mesh),
        derive,
        sequence_parallel,
        seq_len,
        logits,
        allow_unproven,
        progress,
        last="names" if quick else last,
    )
    return _checked(asked, strict=strict)


@with_known_names
@one_at_a_time
def verify(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh | None = None,
    *,
    sequence_parallel: bool | None = None,
    seq_len: int | None = None,
    logits: Logits = "plan",
    strict: bool = False,
    processes: bool = False,
    schedule: str | None = None,
    micro_batches: int | None = None,
    step: str | os.PathLike[str] | None = None,
    allow_unproven: bool = False,
    derive: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Check a plan as `validate` does, at one size, and prove it even where its layouts have errors. A plan that is not proven is
    an error. The report's `proof` has every output, every gradient and every buffer of two training steps.

    Args:
        model, plan, mesh: as for `validate`; the mesh needs a tp size, several pp ranks, or several cp ranks and a plan with rules for cp.
        sequence_parallel, seq_len, logits, strict, allow_unproven: as for `validate`.
        processes: run real gloo processes, one for each rank of the mesh. If False, this process simulates smaller meshes that
            represent it (`docs/what-validate-proves.md`). With several pp ranks the processes run a pipeline's schedule.
        schedule, micro_batches: of this pipeline; None is 1f1b, and twice as many micro-batches as stages.
        step: a Python file with your training step: `make(model) -> state`, `step(model, batches, state) -> loss` and, for a pipeline with its
            own loss, `loss_fn(logits, labels)` (`docs/proving-a-step.md`). Where the plan is right, it runs on the mesh's gloo processes and on one.
        progress: called with what is being done.
        derive: as for `validate`.

    Raises:
        ValueError: as for `validate`; data parallelism alone without `processes`; more processes than one machine can run; a schedule that
            does not fit; with `processes`, a model that they cannot find; a `step` that is not such a file; a `step` on a mesh of one rank.
        TypeError: as for `validate`; a mesh with neither tp nor several ep, pp or cp ranks, without `step`.
    """
    sizes = sizes_of(mesh)
    if sizes.tp is None and sizes.pp == sizes.ep == sizes.cp == 1 and step is None:
        raise TypeError("verify needs a tp size, or several ep, pp or cp ranks")
    sizes = replace(sizes, tp=sizes.tp or 1)
    if step is not None:
        check_step_file(step, sizes)
    if (processes or step is not None) and sizes.world_size > MOST_PROCESSES:
        option = "processes=True (--processes)" if processes else "step (--step)"
        raise ValueError(f"{option} starts at most {MOST_PROCESSES}, not {sizes.world_size}: use a smaller mesh")
    if (schedule is not None or micro_batches is not None) and not ((processes or step) and sizes.pp > 1):
        raise ValueError(
            "a schedule and micro-batches are for pipeline stages in real processes: pass processes=True (--processes) and several "
            "pp ranks (--pp)"
        )
    nothing = sizes.tp == sizes.ep == 1 and sizes.world_size > sizes.pp and not processes
    if nothing and step is None and sizes.cp == 1:
        raise ValueError(NOTHING)
    record = None
    if (processes or step is not None) and sizes.pp > 1:
        from shardplan.runtime.pipeline.pipeline_options import PipelineOptions

        record = PipelineOptions(schedule or "1f1b", 1 if micro_batches is None else micro_batches).record
    asked = Check(
        model_of(model),
        plan,
        sizes,
        derive,
        sequence_parallel,
        seq_len,
        logits,
        allow_unproven,
        progress,
        run=None
        if nothing and (step is not None or sizes.cp == 1)
        else _Run(processes, record if processes else None, micro_batches),
        step=None if step is None else _Step(os.fspath(step), _Run(True, record, micro_batches)),
    )
    return _checked(asked, strict=strict)


@dataclass(frozen=True)
class _Run:
    """How `verify` proves.

    Args:
        schedule, micro_batches: of the pipeline, where real processes run one; micro_batches None is twice the number of stages.
    """

    processes: bool
    schedule: Schedule | None
    micro_batches: int | None

    def stages(self, variants: Variants, sizes: MeshSizes) -> int:
        """The number of stages of the schedule; 0 without a schedule."""
        if self.schedule is None:
            return 0
        from shardplan.runtime.pipeline.layout_of_stages import stage_sizes

        first = next(iter(variants.resolved.values()))
        return len(stage_sizes(first, self.schedule, sizes.pp, None, self.micro_batches))

    def proven_whole(
        self, wanted: tuple[Overlays, ...], sizes: MeshSizes, cut: StagedPlan | None
    ) -> tuple[Overlays, ...]:
        """The variants that are proven with the whole model, not only stage by stage."""
        if sizes.pp == 1:
            return wanted
        if cut is None:
            return ()
        if replace(sizes, pp=1).splits_layers:
            return wanted
        return wanted[:1] if self.processes else ()  # only stages: processes run them like a whole model

    def question(self, asked: Question, sizes: MeshSizes, cut: StagedPlan | None) -> Question:
        """The question for the proof of a plan, cut into stages or not."""
        asked = replace(asked, mesh=sizes, processes=self.processes)
        if self.schedule is None or cut is None:
            return asked
        from shardplan.proof.pipelined import scheduled_for

        return replace(asked, scheduled=partial(scheduled_for, asked.reduced, cut, self.schedule, self.micro_batches))


@dataclass(frozen=True)
class _Step:
    """The file of a training step, and how it is run."""

    script: str
    run: _Run


@dataclass(frozen=True)
class Check:
    """The question to `validate` or `verify`.

    Args:
        last: the last stage that runs.
        run: for `verify`, which proves a plan without structural errors.
        step: the training step that is compared where nothing else is wrong.
    """

    model: Model
    plan: AnyPlan
    sizes: MeshSizes
    derive: bool = True
    sequence_parallel: bool | None = None
    seq_len: int | None = None
    logits: Logits = "plan"
    allow_unproven: bool = False
    progress: Callable[[str], None] = lambda text: None
    last: Stage = "proof"
    run: _Run | None = None
    step: _Step | None = None


def _checked(asked: Check, *, strict: bool) -> Report:
    if asked.seq_len is not None:
        check_count("seq_len", asked.seq_len, MOST_TOKENS)
    quick = asked.last == "names"
    report = look_early(asked.model, asked.plan, asked.sizes, asked.sequence_parallel, quick=quick)
    if report.ok and not quick:
        report = _look(report, asked)
    findings = ordered(report.diagnostics, report.sources)
    return replace(report, diagnostics=as_errors(findings) if strict else findings)


def _look(report: Report, asked: Check) -> Report:
    """Check the plan against the model itself; `report` has the checks before it."""
    sizes, plan = asked.sizes, asked.plan
    on = asked.sequence_parallel
    how = deriving(asked.model, sizes, derive=asked.derive, sequence_parallel=on, progress=asked.progress)
    split = sizes.needs_rules or asked.logits == "fused"
    given = look_up(asked.model, plan, split=split, derive=how)
    report = replace(report, sources=given.sources, diagnostics=given.findings, derived=given.derived)
    if given.found is None or given.plan is None:
        return report
    wanted = wanted_variants(given.plan, on, sizes)
    variants, allowed = at_a_size(given, sizes, wanted, seq_len=asked.seq_len)
    report = replace(
        report,
        stages=(*report.stages, "structure"),
        checked_tp=next(iter(variants.resolved.values())).sizes.tp,
        variants=tuple(map(variant_name, wanted)),
        allowed_tp=allowed,
    )
    if asked.last != "structure" and not variants.any_error:
        report, variants = prove_variants(report, variants, given, asked)
        if asked.step is not None and not variants.any_error:
            report, variants = _with_step(report, variants, given, asked, asked.step)
    return replace(
        report,
        diagnostics=(*given.findings, *variants.all_findings),
        secondary=ordered(variants.secondary, given.sources),
    )


def prove_variants(report: Report, variants: Variants, given: Given, asked: Check) -> tuple[Report, Variants]:
    """Check the layouts and the pipeline stages of a plan without structural errors. Prove it where they have no errors;
    `verify` proves it wherever it runs."""
    from shardplan.compiler.layout import ModelLayouts
    from shardplan.proof.prove_stages import with_pipeline
    from shardplan.proof.stage import Question, nothing_proven, prove_stage, prove_whole_in_lower

    (found, plan), sizes, run, allow = given.both, asked.sizes, asked.run, asked.allow_unproven
    blocks = run.stages(variants, sizes) if run is not None else 0
    asked.progress("checking layouts")
    sizes = replace(sizes, tp=report.checked_tp or 1)
    processes = run is not None and run.processes
    reduced = ModelLayouts.for_mesh(found, variants.resolved.values(), sizes, whole=processes, blocks=blocks)
    variants = prove_layouts(variants, plan, reduced, allow_unproven=allow)
    looked: tuple[Stage, ...] = (*report.stages, "layouts") if variants.layouts else report.stages
    allowed = variants.allowed(report.allowed_tp or ())
    variants, staged = prove_stages(variants, plan, reduced, allow_unproven=allow, anyway=run is not None)
    cut = staged if staged is not None and staged.ok and sizes.pp > 1 else None
    question = Question(reduced, asked.model, plan, asked.logits, allow, sizes)
    wanted, proof = tuple(variants.resolved), None
    if run is not None:
        question = run.question(question, sizes, cut)
        wanted = run.proven_whole(wanted, sizes, cut)
    elif asked.last != "proof" or variants.any_error or not variants.layouts or not reduced.runs:
        wanted = ()
    if sizes.tp == 1 and sizes.pp == 1 and not question.processes:
        wanted = tuple(on for on in wanted if on and on <= BESIDE_TP)  # the others split nothing
    if wanted:
        proof, about = prove_stage(question, wanted, asked.progress)
        variants, looked = variants.with_findings(about), (*looked, "proof")
        if any(any_error(found) for found in about.values()):
            cut = None  # the stages would have the same errors
    elif asked.last == "proof" and run is None and not variants.any_error:
        variants = variants.with_findings({on: prove_whole_in_lower(question, on) for on in variants.resolved})
    if cut is not None and (run is not None or (asked.last == "proof" and not variants.any_error and reduced.runs)):
        asked.progress(f"pp={sizes.pp}: comparing the stages with the whole model")
        proof, wrong = with_pipeline(
            proof or NumericProof(sizes, ()),
            question,
            cut,
            tuple(variants.resolved),
            run.schedule if run is not None else None,
        )
        variants = variants.with_findings(dict.fromkeys(variants.findings, wrong))
        looked = (*looked, "proof") if "proof" not in looked else looked
    if run is not None and not variants.any_error and (proof is None or not proof.ok):
        variants = variants.with_findings(dict.fromkeys(variants.findings, (nothing_proven(proof),)))
    return replace(report, stages=looked, allowed_tp=allowed, proof=proof), variants


def _with_step(report: Report, variants: Variants, given: Given, asked: Check, step: _Step) -> tuple[Report, Variants]:
    """Compare a training step on the processes of the mesh with the same step on one process, for the variant of the plan that was asked for."""
    from shardplan.compiler.layout import ModelLayouts
    from shardplan.proof.prove_step import StepQuestion, prove_step

    (found, plan), sizes, run = given.both, asked.sizes, step.run
    on = overlays_of(bool(asked.sequence_parallel), sizes, context=plan.has_context)
    blocks = run.stages(variants, sizes)
    layouts = ModelLayouts.for_mesh(found, variants.resolved.values(), sizes, whole=True, blocks=blocks)
    question = StepQuestion(
        step.script, layouts, asked.model, plan, sizes, on, asked.logits, run.schedule, run.micro_batches
    )
    wrong, apart = prove_step(question, asked.progress)
    variants = variants.with_findings(dict.fromkeys(variants.findings, wrong))
    report = replace(report, stages=(*report.stages, "step"))
    return report if wrong else replace(report, step=step.script, step_apart=apart), variants


@with_known_names
@one_at_a_time
def coverage(
    model: AnyModel,
    plan: AnyPlan = "auto",
    *,
    derive: bool = True,
) -> Coverage:
    """The parts of a model that a plan splits, the parts that stay whole on every rank, and the tp sizes that both allow. Nothing is proven.

    Args:
        model, plan, derive: as for `validate`.

    Raises:
        PlanError: the model cannot be found, or the plan cannot be bound to it.
    """
    from shardplan.compiler.lower import split_parameters
    from shardplan.core.coverage import Coverage, covered

    named = model_of(model)
    given = look_up(named, plan, derive=deriving(named, MeshSizes(), derive=derive, sequence_parallel=False))
    raise_errors(given.findings, given.sources)
    found, read = given.both
    bound = bind_variants(read, found.tree, MeshSizes(), wanted_variants(read, None, MeshSizes()))
    raise_errors(bound.all_findings, given.sources)
    split, whole = covered(found.tree, split_parameters(bound.resolved[NO_OVERLAYS]))
    allowed = {variant_name(on): allowed_tp(resolved) for on, resolved in bound.resolved.items()}
    return Coverage(given.model.shown, read.name, allowed, split, whole)


# Checks of the file of a training step, before it runs.
MOST = 2**20  # bytes
FUNCTIONS = {"make": "make(model)", "step": "step(model, batches, state)"}


def check_step_file(path: str | os.PathLike[str], sizes: MeshSizes) -> None:
    """Raise ValueError for a file that cannot be read, is not Python or lacks one of the two functions, and for a mesh of one rank."""
    name = os.fspath(path)
    if sizes.world_size == 1:
        raise ValueError("a step (--step) is compared with one process: give a mesh of several ranks")
    try:
        tree = ast.parse(decode(read_bytes(path, MOST)), name)
    except CannotRead as error:
        raise ValueError(f"the step {name} {error.reason}") from None
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the step {name} is no Python: {error}") from None
    named = {
        name.id
        if isinstance(name, ast.Name)
        else name.asname or name.name
        if isinstance(name, ast.alias)
        else name.name
        for name in ast.walk(tree)
        if isinstance(name, ast.Name | ast.alias | ast.FunctionDef)
    }
    for function, form in FUNCTIONS.items():
        if function not in named:
            raise ValueError(f"the step {name} has no function {form}")
