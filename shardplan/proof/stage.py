"""The proof as the last stage of `validate`, and as the step of `apply_plan` before it changes a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower import Program
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.overrides import Logits
from shardplan.compiler.user_inputs import Model
from shardplan.compiler.variants import Variants
from shardplan.core.diagnostics import Diagnostic, PlanError, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Overlays, PlanFile, without_sequence
from shardplan.core.report import NumericProof
from shardplan.runtime.apply.agreement import on_first_rank
from shardplan.torchlib.modes import reduced_runs

from .other_sides import OtherSides, only_with, other_sides
from .pipelined import Scheduled
from .proof_findings import UNREACHED, asking_for_ranks, findings_of
from .prove import EAGER, compile_for, meshes_of, on_mesh, prove, reduced_for
from .remembered_proofs import ModelNow, digest_of, known, remember
from .section_dtype import DtypeTrial, LowerDtypes, lower_dtypes

# Descriptions of how a proof is known.
EARLIER, NOW = "by an earlier proof in this process", "before it was applied"

Findings = Mapping[Overlays, tuple[Diagnostic, ...]]


@dataclass(frozen=True)
class Question:
    """The subject of a proof.

    Args:
        reduced: the reduced model, as for `prove`.
        source: the model that it represents.
        plan: the plan, without findings of the earlier stages.
        logits: as for `compile_plan`.
        allow_unproven: as for `validate`.
        mesh: the mesh to prove it for; None is the smallest with the axes of the reduced model.
        processes: use real processes instead of a simulation.
        autocast: the dtype in which the forward will run under torch.autocast.
        scheduled: returns a pipeline's run for the processes. Raises PlanError where the reduced model has no inputs for it.
    """

    reduced: ModelLayouts
    source: Model
    plan: PlanFile
    logits: Logits = "plan"
    allow_unproven: bool = False
    mesh: MeshSizes | None = None
    processes: bool = False
    scheduled: Callable[[], Scheduled] | None = None
    autocast: torch.dtype | None = None

    @property
    def sizes(self) -> MeshSizes:
        return self.mesh or self.reduced.sizes

    @cached_property
    def other_sides(self) -> OtherSides:
        """The branches of the user's own code that the reduced model does not take; its runs are costly."""
        return other_sides(self.reduced.reduced_model, self.reduced.recorded_models[0].model)

    def lower_dtypes(self, on: Overlays) -> LowerDtypes | None:
        """The dtypes in which the proof of a variant has to run too."""
        return lower_dtypes(self.reduced, self.plan, self.sizes, on, self.autocast)


@reduced_runs()
def prove_stage(
    asked: Question,
    wanted: Sequence[Overlays],
    progress: Callable[[str], None] = lambda text: None,
    bound: Mapping[MeshSizes, Variants] = MappingProxyType({}),
) -> tuple[NumericProof | None, Findings]:
    """The proof of some variants of a plan, and the findings for each; None where the sharded run raised.

    Findings of a simulation are remembered by digest.

    Args:
        bound: as for `prove`.
    """

    told: tuple[Diagnostic, ...] = ()
    try:
        if not asked.processes:
            told = tuple(asking_for_ranks(asked.reduced, allow_unproven=asked.allow_unproven))
        if any(one.is_error for one in told):
            return None, dict.fromkeys(wanted, told)
        proven = prove(
            asked.reduced,
            asked.source,
            asked.plan,
            asked.sizes,
            wanted,
            logits=asked.logits,
            processes=asked.processes,
            scheduled=asked.scheduled() if asked.scheduled is not None else None,
            allow_unproven=asked.allow_unproven,
            bound=bound,
            progress=progress,
        )
    except PlanError as error:
        return None, dict.fromkeys(wanted, (*told, *error.diagnostics))
    about = findings_of(proven, asked.reduced, allow_unproven=asked.allow_unproven)
    found = {on: (*told, *said) for on, said in about.items()}
    if asked.reduced.found.own_code and not asked.processes:
        found = dict(_on_other_sides(asked, wanted, found))
    if asked.processes:
        return proven.proof, found
    proof = proven.proof
    lower = {on: asked.lower_dtypes(on) for on in proven.programs}
    right = {on: one for on, one in proven.programs.items() if not any(about.is_error for about in found[on])}
    for dtypes, programs in _by_dtypes(lower, right):
        progress(f"once in {dtypes.shown}")
        of_mesh = reduced_for(asked.reduced, next(iter(programs.values())).resolved.sizes)
        more = DtypeTrial(of_mesh.reduced_model, programs, dtypes).findings()
        found = {**found, **{on: (*found[on], *about) for on, about in more.items()}}
        proof = replace(proof, once_in=dtypes.shown)
    now = ModelNow(asked.reduced)
    for on, program in proven.programs.items():
        meshes = meshes_of(asked.reduced, asked.plan, asked.sizes, on)
        remember(digest_of(now, program, asked.allow_unproven, meshes, lower[on]), found[on])
    return proof, found


def _by_dtypes(
    lower: Mapping[Overlays, LowerDtypes | None], programs: Mapping[Overlays, Program]
) -> Iterator[tuple[LowerDtypes, Mapping[Overlays, Program]]]:
    """The programs with lower dtypes: those of one mesh together."""
    groups: dict[MeshSizes, tuple[LowerDtypes, dict[Overlays, Program]]] = {}
    for on, program in programs.items():
        if (dtypes := lower[on]) is not None:
            groups.setdefault(program.resolved.sizes, (dtypes, {}))[1][on] = program
    yield from groups.values()


def _on_other_sides(asked: Question, wanted: Sequence[Overlays], found: Findings) -> Findings:
    """Findings for the other branches of the user's own code, for the variants that are right in the first branches."""
    for branches, lines in asked.other_sides.branches:
        right = [on for on in wanted if not any(one.is_error for one in found[on])]
        if not right:
            break
        try:
            reduced = asked.reduced.with_branches(branches)
            proven = prove(
                reduced, asked.source, asked.plan, asked.sizes, right, logits=asked.logits, allow_unproven=True
            )
            more = findings_of(proven, reduced, allow_unproven=True)
        except PlanError as error:
            more = dict.fromkeys(right, error.diagnostics)
        for on in right:
            found = {**found, on: (*found[on], *only_with(lines, more[on]))}
    return {on: (*found[on], *asked.other_sides.warning()) for on in wanted}


@reduced_runs()
@torch.random.fork_rng(devices=[])
def prove_whole_in_lower(asked: Question, on: Overlays) -> tuple[Diagnostic, ...]:
    """SP424 for the whole model in the dtypes in which it trains, where no layer is split: with data-parallel ranks alone, or stages."""
    if (
        asked.sizes.replicas * asked.sizes.pp == 1
        or not asked.reduced.runs
        or (lower := asked.lower_dtypes(on)) is None
    ):
        return ()
    one = MeshSizes(tp=1)
    on = without_sequence(on)
    try:
        program = program_of(compile_for(asked.reduced, asked.plan, one, (on,)), on, sections=EAGER)
    except PlanError:  # the plan does not fit the reduced model
        return ()
    digest = digest_of(ModelNow(asked.reduced), program, asked.allow_unproven, (), lower)
    if (found := known(digest)) is None:
        found = DtypeTrial(asked.reduced.reduced_model, {on: program}, lower).whole_findings()
        remember(digest, found)
    return found


def nothing_proven(proof: NumericProof | None) -> Diagnostic:
    """SP421 for a plan without findings."""
    if proof is None:
        why = "there is no reduced model that runs"
    elif any(row.verdict == "equal" for row in proof.rows):
        why = "the plan splits nothing"
    else:
        why = "every tensor is too small to be compared"
    return Diagnostic(code=UNREACHED, severity=Severity.ERROR, message=f"nothing is proven: {why}")


@reduced_runs()
def prove_on_first_rank(asked: Question, on: Overlays, mesh: DeviceMesh) -> tuple[tuple[Diagnostic, ...], str]:
    """The findings of the proof of one variant, and in words how they are known. The mesh's first rank looks them up or proves
    the variant, and sends the result to the others."""

    def answer() -> tuple[tuple[Diagnostic, ...], str]:
        meshes = meshes_of(asked.reduced, asked.plan, asked.sizes, on)
        told = next(one for one in meshes if on_mesh(on, one) == on)
        compiled = compile_for(reduced_for(asked.reduced, told), asked.plan, told, {on})
        program = program_of(compiled, on, logits=asked.logits, sections=EAGER)
        found = known(digest_of(ModelNow(asked.reduced), program, asked.allow_unproven, meshes, asked.lower_dtypes(on)))
        if found is not None:
            return found, EARLIER
        return prove_stage(asked, (on,), bound={told: compiled})[1][on], NOW

    return on_first_rank(answer, mesh)


@reduced_runs()
def prove_whole_on_first_rank(asked: Question, on: Overlays, mesh: DeviceMesh) -> tuple[Diagnostic, ...]:
    """As `prove_whole_in_lower`, by the mesh's first rank for all."""
    return on_first_rank(lambda: prove_whole_in_lower(asked, on), mesh)
