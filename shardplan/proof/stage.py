"""The proof as the last stage of `validate`, and before `apply_plan` touches a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lowering_stage import program_of
from shardplan.compiler.overrides import Logits
from shardplan.compiler.user_inputs import Model
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Overlays, PlanFile
from shardplan.core.report import VerifyReport
from shardplan.runtime.apply.agreement import on_first_rank
from shardplan.torchlib.modes import reduced_runs

from .proof_findings import findings_of
from .prove import EAGER, compile_for, prove
from .remembered_proofs import digest_of, known, remember

Findings = Mapping[Overlays, tuple[Diagnostic, ...]]


@dataclass(frozen=True)
class Question:
    """What is to be proven.

    Args:
        reduced: the reduced model, at the size of tp.
        source: the model that it stands for.
        plan: without findings of the stages before.
        logits: as for `compile_plan`.
        allow_unproven: as for `validate`.
    """

    reduced: ModelLayouts
    source: Model
    plan: PlanFile
    logits: Logits = "plan"
    allow_unproven: bool = False

    @property
    def sizes(self) -> MeshSizes:
        return self.reduced.sizes


@reduced_runs()
def prove_stage(
    asked: Question, wanted: Sequence[Overlays], progress: Callable[[str], None] = lambda text: None
) -> tuple[VerifyReport | None, Findings]:
    """The proof of some variants of a plan, and what it finds in each; None where the sharded run raised.

    The findings are remembered by digest.
    """

    try:
        proven = prove(
            asked.reduced,
            asked.source,
            asked.plan,
            asked.sizes,
            wanted,
            logits=asked.logits,
            allow_unproven=asked.allow_unproven,
            progress=progress,
        )
    except PlanError as error:
        return None, dict.fromkeys(wanted, error.diagnostics)
    found = findings_of(proven, asked.reduced, allow_unproven=asked.allow_unproven)
    for on, program in proven.programs.items():
        remember(digest_of(asked.reduced, program, asked.allow_unproven), found[on])
    return proven.report, found


@reduced_runs()
def prove_on_first_rank(asked: Question, on: Overlays, mesh: DeviceMesh) -> tuple[tuple[Diagnostic, ...], str]:
    """What the proof of one variant finds, and how that is known, in words. The first rank of the mesh looks it up or proves,
    and sends the result to the others."""

    def answer() -> tuple[tuple[Diagnostic, ...], str]:
        compiled = compile_for(asked.reduced, asked.plan, asked.sizes, {on})
        program = program_of(compiled, on, logits=asked.logits, sections=EAGER)
        digest = digest_of(asked.reduced, program, asked.allow_unproven)
        found = known(digest)
        if found is not None:
            return found, "by an earlier proof in this process"
        return prove_stage(asked, (on,))[1][on], "before it was applied"

    return on_first_rank(answer, mesh)
