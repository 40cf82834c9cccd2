"""The numeric proof of a plan: a reduced model, sharded, against the same model unsharded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower import Program
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.overrides import Logits, Override
from shardplan.compiler.user_inputs import Model
from shardplan.compiler.variants import Variants, any_error, bind_variants, check_variants
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.module_program import ModuleProgram
from shardplan.core.plan import Overlays, PlanFile, ResolvedPlan, variant_name, variant_words, without_sequence
from shardplan.core.proof_meshes import proof_meshes
from shardplan.core.report import Comparison, NumericProof, VariantProof
from shardplan.core.sections import DataParallel
from shardplan.core.tree import full_name
from shardplan.model.reduced.precision import in_dtype
from shardplan.model.reduced.reduced_model import ReducedModel
from shardplan.runtime.pipeline.refused_plans import for_stages
from shardplan.styles.backends import BACKENDS
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.modes import reduced_runs

from .calls import NOTHING, Checkpointed, calls_of, checkpointed_by
from .compare import compare_steps, worst_of
from .failure import RAISES, sharded_run
from .first_difference import FirstDifference, first_difference
from .narrowing import note_of, only_with
from .pipelined import Scheduled, ScheduledRecipe
from .processes import Case, Recipe, check_sendable, run_processes
from .rank import Left
from .reach import touched, unreached_modules, unreached_parameters
from .simulate import Run, simulate
from .steps import LOUD, Batch, Steps, averaged, cast, is_linear, reference_of
from .threads import OnRanks, rank_threads


@dataclass(frozen=True)
class Proven:
    """The result of `prove`.

    Args:
        proof: the comparisons.
        programs: variant -> its program for the reduced model, on the first mesh.
        missing: variant -> the parts that no run reached, in the names of the reduced model.
        first: variant that differs -> its first difference, where a boundary of a module shows one.
    """

    proof: NumericProof
    programs: Mapping[Overlays, Program]
    missing: Mapping[Overlays, tuple[str, ...]]
    first: Mapping[Overlays, FirstDifference]


def compile_for(
    reduced: ModelLayouts, plan: PlanFile, sizes: MeshSizes, wanted: Iterable[Overlays], *, asked: bool = False
) -> Variants:
    """The variants of a plan, compiled for a reduced model as for the model itself, whatever findings its layouts have.

    Args:
        asked: whether the mesh is the one to prove the plan for; else it represents that mesh, and data parallelism changes no number.

    Raises:
        PlanError: the plan fits the model itself but has errors on the reduced one, or the reduced model does not run.
    """
    both = {*wanted, *map(without_sequence, wanted)}

    def checked() -> Variants:
        bound = bind_variants(plan, reduced.tree, sizes, both)
        of_mesh = {} if asked else {on: _in_full_precision(one) for on, one in bound.resolved.items()}
        return check_variants(replace(bound, resolved=of_mesh or bound.resolved))

    variants = checked()
    if any(any_error(variants.findings[on]) for on in wanted) and reduced.fit(plan, both):
        variants = checked()
    for on in wanted:
        if any_error(variants.findings[on]):
            raise PlanError(variants.findings[on])
    split = {on: one for on, one in variants.resolved.items() if sizes.splits_layers or one.on_cp is not None}
    return replace(variants, layouts={on: reduced.layouts_of(plan, one) for on, one in split.items()})


@reduced_runs()
@torch.random.fork_rng(devices=[])
def prove(
    reduced: ModelLayouts,
    source: Model,
    plan: PlanFile,
    sizes: MeshSizes,
    variants: Sequence[Overlays],
    *,
    logits: Logits = "plan",
    processes: bool = False,
    scheduled: Scheduled | None = None,
    allow_unproven: bool = False,
    bound: Mapping[MeshSizes, Variants] = MappingProxyType({}),
    progress: Callable[[str], None] = lambda text: None,
) -> Proven:
    """Prove a plan without errors.

    Args:
        reduced: layouts of the reduced model of `source`, at the sizes of tp and ep of the first mesh (`proof_meshes`), or of `sizes` for
            processes.
        sizes: those of the mesh; its pp axis is used only with `scheduled`. Processes are its ranks; a simulated mesh represents it.
        variants: the plan's variants to prove.
        scheduled: a pipeline's schedule, which runs in the processes.
        allow_unproven: parts that the plan touches and no run reached do not prevent a proof.
        bound: mesh -> `compile_for` of these variants on it, where that is known.

    Raises:
        PlanError: no reduced model can be made, or the sharded one does not run.
        ValueError: with processes: they cannot find the model.
    """
    start = time.monotonic()
    if processes:
        check_sendable(source)
    kinds = scheduled.kinds if scheduled is not None else reduced.reduced_model.kinds
    meshes = {on: (replace(sizes, pp=1),) if processes else meshes_of(reduced, plan, sizes, on) for on in variants}
    rows: dict[Overlays, list[Comparison]] = {on: [] for on in variants}
    programs: dict[Overlays, Program] = {}
    wrong_with: dict[Overlays, list[tuple[str, ...]]] = {on: [] for on in variants}
    first: dict[Overlays, FirstDifference] = {}
    every = dict.fromkeys(mesh for on in variants for mesh in meshes[on])
    rounds = False  # whether float32 cannot decide
    for mesh in every:
        progress("building a reduced model")
        of_mesh = reduced if processes else reduced_for(reduced, mesh)
        on_it = {on: on_mesh(on, mesh) for on in variants if mesh in meshes[on]}
        compiled = bound.get(mesh) or compile_for(of_mesh, plan, mesh, set(on_it.values()), asked=processes)
        trials: list[Trial] = []
        for on, variant in on_it.items():
            program = program_of(compiled, variant, logits=logits, sections=EAGER)
            if on == variant:
                programs.setdefault(on, program)
            case: Recipe = ReducedCase(source, program, sizes, of_mesh.axes)
            if scheduled is not None:
                kept = for_stages(program, wrapped=True)
                case = ScheduledRecipe(source, kept, sizes, scheduled, reduced.heads_times, reduced.blocks)
            layouts = compiled.layouts.get(variant)
            known = layouts.diagnostics if layouts is not None else ()
            trials.append(Trial(case, program, of_mesh.reduced_model, None if processes else mesh.world_size, known))
        if not processes:
            rounds = rounds or _rounds(of_mesh.reduced_model, checkpointed_by(trials[0].program))
        made: list[tuple[Comparison, ...]] = []
        try:
            with nullcontext() if processes else rank_threads(mesh.world_size) as on_ranks:
                for on, trial in zip(on_it, trials, strict=True):
                    shown = variant_words(variant_name(on))
                    progress(f"{shown}, {mesh.shown}: comparing with the unsharded model")
                    # float64 at once, if a variant of the same model differed in float32
                    rounds = rounds or any(row.dtype == "float64" for rows in made for row in rows)
                    made.append(trial.settled(on_ranks, at_once=rounds))
        except PlanError as error:
            raise PlanError(trials[len(made)].narrowed(error.diagnostics)) from error.__cause__
        for on, trial, found in zip(on_it, trials, made, strict=True):
            rows[on] += found
            if any(row.verdict == "differs" for row in found):
                wrong_with[on].append(trial.wrong_with())
                if on not in first and (place := trial.first_difference()) is not None:
                    first[on] = place
    proofs, missing = [], {}
    for on, program in programs.items():
        ranks = max(mesh.replicas for mesh in meshes[on])
        of = partial(steps_of, reduced.reduced_model, dtype=torch.float32, under=checkpointed_by(program))
        runs = [of(kind, index=index) for kind in kinds for index in range(ranks)]
        missing[on] = (
            *unreached_parameters(reduced, [steps for _, steps in runs], kinds),
            *unreached_modules(reduced, program),
        )
        unproven = tuple(touched(missing[on], program, reduced)) if not allow_unproven else ()
        untouched = [n for n in missing[on] if n not in unproven]
        proofs.append(
            VariantProof(
                variant_name(on),
                worst_of(rows[on]),
                *_counts(reduced.recorded_models[0].model, program.modules),
                reduced.names_in_model(untouched),
                reduced.names_in_model(unproven),
                scheduled.schedule.name if scheduled is not None else None,
                scheduled.micro_batches if scheduled is not None else None,
                returns_tokens(program.resolved.on_cp),
                tuple(dict.fromkeys(chain.from_iterable(wrong_with[on]))) if all(wrong_with[on]) else (),
            )
        )
    under = checkpointed_by(next(iter(programs.values())))  # the same in every variant
    called = (
        () if scheduled is not None else tuple(calls_of(reduced.reduced_model, kind, under).proven for kind in kinds)
    )
    seconds = time.monotonic() - start
    proof = NumericProof(sizes, tuple(proofs), processes, seconds, calls=called, meshes=tuple(every))
    return Proven(proof, programs, missing, first)


def _in_full_precision(resolved: ResolvedPlan) -> ResolvedPlan:
    """The plan with FSDP2 in the model's dtypes, on any number of ranks."""
    section = resolved.data_parallel
    if section is None:
        return resolved
    kept = section.reshard_after_forward
    kept = kept if isinstance(kept, bool | str) else True  # a number of ranks is for the requested mesh
    section = replace(section, mixed_precision=None, cpu_offload=False, reshard_after_forward=kept)
    return replace(resolved, data_parallel=section)


def meshes_of(reduced: ModelLayouts, plan: PlanFile, sizes: MeshSizes, on: Overlays) -> tuple[MeshSizes, ...]:
    """The meshes on which a variant is simulated. On a mesh with ep or cp, a variant without rules for this axis is proven only for tp."""
    if ("expert_parallel" not in on and sizes.ep > 1) or ("context_parallel" not in on and sizes.cp > 1):
        return (MeshSizes(tp=sizes.tp),)
    section = bind_variants(plan, reduced.tree, sizes, (on,)).resolved[on].data_parallel
    return proof_meshes(replace(simulated_sizes(sizes, section), pp=1), over_cp=reduced.over_cp)


def on_mesh(on: Overlays, mesh: MeshSizes) -> Overlays:
    """The part of a variant that runs on a mesh: rules for cp only where the mesh has a cp axis."""
    return on if mesh.cp > 1 else on - {"context_parallel"}


def simulated_sizes(sizes: MeshSizes, section: DataParallel | None) -> MeshSizes:
    """The sizes without data-parallel ranks if the plan does not wrap the model with `fully_shard`: other backends are not simulated."""
    if section is not None and not BACKENDS[section.backend].fully_shard:
        return replace(sizes, dp_replicate=1, dp_shard=1)
    return sizes


def reduced_for(reduced: ModelLayouts, mesh: MeshSizes) -> ModelLayouts:
    """The reduced model at the sizes of a mesh."""
    if mesh.ep in (1, reduced.ep) and mesh.cp in (1, reduced.cp) and mesh.tp == reduced.tp:
        return reduced
    return reduced.of(tp=mesh.of(Axis.TP), ep=mesh.ep, pp=1, blocks=0, cp=mesh.cp)


EAGER: Mapping[str, Override] = {"compile": False}  # compiling takes long, and changes no number
_Of = tuple[str, torch.dtype, int, tuple[str, ...] | None, Checkpointed, float]
_REFERENCES: WeakKeyDictionary[ReducedModel, dict[_Of, tuple[Sequence[Batch], Steps]]] = WeakKeyDictionary()
_LINEAR: WeakKeyDictionary[ReducedModel, dict[str, bool]] = WeakKeyDictionary()


def steps_of(
    reduced_model: ReducedModel,
    kind: str,
    dtype: torch.dtype,
    index: int = 0,
    *,
    only: Collection[str] | None = None,
    under: Checkpointed = NOTHING,
    size: float = 1.0,
) -> tuple[Sequence[Batch], Steps]:
    """The batches of a data-parallel rank and the unsharded steps on them; each is run once for a reduced model.

    Args:
        kind: the kind of input.
        index: the rank.
        only: the changes to the plain call; None: all changes that are tried.
        under: the plan's checkpoints: calls that do not run under them are left out. The steps themselves run without.
        size: as of `Steps`.
    """
    known = _REFERENCES.setdefault(reduced_model, {})
    key = (kind, dtype, index, None if only is None else tuple(only), under, size)
    if key not in known:
        with reduced_model.running():
            calls = calls_of(reduced_model, kind, under, only)
            batches = [cast(batch, dtype) for batch in calls.batches(index)]
            known[key] = batches, reference_of(partial(_built, reduced_model, dtype), batches, size)
    return known[key]


def _is_linear(reduced_model: ReducedModel, kind: str) -> bool:
    """`is_linear` for a kind of input, asked once for a reduced model."""
    known = _LINEAR.setdefault(reduced_model, {})
    if kind not in known:
        with reduced_model.running():
            batch = cast(calls_of(reduced_model, kind, only=()).batches()[0], torch.float32)
            known[kind] = is_linear(_built(reduced_model, torch.float32), batch)
    return known[kind]


def _rounds(reduced_model: ReducedModel, under: Checkpointed) -> bool:
    """Whether the unsharded model itself differs between float32 and float64 by more than the tolerance for float32: then a run of all
    ranks in float32 cannot decide. False for a model that does not run in float64."""
    for kind in reduced_model.kinds:
        _, single = steps_of(reduced_model, kind, torch.float32, under=under)
        try:
            _, exact = steps_of(reduced_model, kind, torch.float64, under=under)
        except Exception:  # from the model's own code
            return False
        left = Left(exact.outputs, exact.gradients, exact.buffers, {})
        if any(row.verdict == "differs" for row in compare_steps(single, {"float64": left})):
            return True
    return False


@dataclass(frozen=True)
class ReducedCase:
    """One proof, in a form that can be sent to other processes.

    Args:
        axes: the reduced model's, as in `ModelLayouts`.
    """

    source: Model
    program: Program
    sizes: MeshSizes
    axes: Mapping[str, Any]

    def cases(self, dtype: torch.dtype) -> Iterator[Case]:
        """The cases for `run_processes`, one for each kind of input: each process makes the reduced model anew."""
        assert self.sizes.tp is not None  # a proof has one size
        reduced_model = ModelLayouts(self.source.find(), **self.axes).reduced_model
        for kind in reduced_model.kinds:
            batches = calls_of(reduced_model, kind, checkpointed_by(self.program)).batches
            yield Case(reduced_model.build, batches, self.program, self.sizes, dtype)


@dataclass(frozen=True)
class Trial:
    """A variant on a mesh.

    Args:
        case: the case for processes.
        ranks: the number of simulated ranks; None for processes.
        known: the findings of the layout check.
    """

    case: Recipe
    program: Program
    reduced_model: ReducedModel
    ranks: int | None
    known: tuple[Diagnostic, ...]

    def settled(self, on_ranks: OnRanks | None, *, at_once: bool) -> tuple[Comparison, ...]:
        """Run every kind of input that the model takes; each row is the worst of them.

        Args:
            on_ranks: calls a function on the simulated ranks.
            at_once: as in `settle`.

        Raises:
            PlanError: as in `sharded_run`.
        """
        with sharded_run(self.known):
            return settle(partial(self._rows, on_ranks, None), at_once=at_once)

    def _rows(
        self, on_ranks: OnRanks | None, only: Collection[str] | None, dtype: torch.dtype
    ) -> tuple[Comparison, ...]:
        if on_ranks is None:
            return worst_of(row for run in run_processes(self.case, dtype) for row in run)
        rows = (simulate(run, self.program, on_ranks) for run in self._runs(only, dtype))
        return worst_of(row for found in rows for row in found)

    def _runs(self, only: Collection[str] | None, dtype: torch.dtype) -> Iterator[Run]:
        """For each kind of input: what makes the model, and for each data-parallel rank its batches and the unsharded steps."""
        for kind in self.reduced_model.kinds:
            of = partial(steps_of, self.reduced_model, kind, dtype, only=only, under=checkpointed_by(self.program))
            for size in (1.0,) if _is_linear(self.reduced_model, kind) else (1.0, LOUD):
                made = [of(index, size=size) for index in range(self.program.resolved.sizes.replicas)]
                references = averaged([steps for _, steps in made])
                yield Run(partial(_built, self.reduced_model, dtype), [batches for batches, _ in made], references)

    def first_difference(self) -> FirstDifference | None:
        """Where the first difference is, by one more run; None for processes, and where ranks of cp and of tp split one value."""
        if self.ranks is None or (self.program.resolved.sizes.cp > 1 and self.program.resolved.sizes.tp != 1):
            return None
        for run in self._runs(None, torch.float64):
            with rank_threads(self.ranks) as on_ranks:
                if (found := first_difference(run, self.program, on_ranks)) is not None:
                    return found
        return None

    def wrong_with(self, dtype: torch.dtype = torch.float64) -> tuple[str, ...]:
        """The calls with which the variant is wrong, if the plain call is right (`only_with`); empty for processes, which take long to
        start."""
        if self.ranks is None:
            return ()
        under = checkpointed_by(self.program)
        every = (calls_of(self.reduced_model, kind, under).changes for kind in self.reduced_model.kinds)
        changes = dict.fromkeys(change for changes in every for change in changes)
        return only_with(lambda on_ranks, only: self._rows(on_ranks, only, dtype), tuple(changes), self.ranks)

    def narrowed(self, raised: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
        """The findings about a run that raised, with the calls that raise."""
        if not any(one.code == RAISES for one in raised) or not (only := self.wrong_with(torch.float32)):
            return raised
        return tuple(replace(one, notes=(*one.notes, note_of(only))) for one in raised)


def _built(reduced_model: ReducedModel, dtype: torch.dtype) -> nn.Module:
    return in_dtype(reduced_model.build(), dtype)


def settle(run: Callable[[torch.dtype], tuple[Comparison, ...]], *, at_once: bool = False) -> tuple[Comparison, ...]:
    """Run in float32. Differences may be rounding there, so the whole case then runs again in float64, which decides. With
    `at_once` it runs only in float64."""
    if at_once:
        return run(torch.float64)
    rows = run(torch.float32)
    if all(row.verdict != "differs" for row in rows):
        return rows
    exact = {(row.kind, row.name): row for row in run(torch.float64)}
    return tuple(exact.get((row.kind, row.name), row) if row.verdict == "differs" else row for row in rows)


def _counts(model: nn.Module, modules: Mapping[str, ModuleProgram]) -> tuple[int, int]:
    """(elements of all parameters, elements of split parameters); tied parameters count once."""
    split = {
        full_name(module.name, p.name) for module in modules.values() for p in module.parameters if p.dim is not None
    }
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if name in split)
