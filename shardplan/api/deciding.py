"""The decisions that `apply_plan` takes before it changes a model, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.compiler.pipeline import AS_IT_IS, Changes, Compiled, compile_variant
from shardplan.compiler.user_inputs import AnyPlan, Model
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import BESIDE_TP
from shardplan.report.errors import raise_errors
from shardplan.styles.backends import BACKENDS

from .deriving import Share, alone, deriving

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from shardplan.compiler.lower import Program
    from shardplan.core.derived_plan import DerivedPlan
    from shardplan.core.diagnostics import Diagnostic
    from shardplan.runtime.apply.plan_mesh import PlanMesh
    from shardplan.runtime.pipeline import PipelineOptions
    from shardplan.runtime.pipeline.pipelined_model import Layout

WHOLE = "data parallel only: nothing is split"  # how a program without tp and ep is known to be right


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of `compile_plan`."""

    model: Model
    plan: AnyPlan
    changes: Changes = AS_IT_IS
    seq_len: int | None = None
    strict: bool = False
    allow_unproven: bool = False
    derive: bool = True

    def compiled(
        self,
        sizes: MeshSizes,
        progress: Callable[[str], None] = lambda text: None,
        share: Share = alone,
        *,
        autocast: bool = False,
    ) -> Compiled:
        """Compile the variant through all stages, up to the first that finds errors.

        Args:
            progress, share: as for `deriving`.
            autocast: as for `compile_variant`.

        Raises:
            TypeError, ValueError: as `compile_variant`.
        """
        overlay = self.changes.sequence_parallel
        return compile_variant(
            self.model,
            sizes,
            self.plan,
            self.changes,
            seq_len=self.seq_len,
            strict=self.strict,
            allow_unproven=self.allow_unproven,
            derive=deriving(
                self.model, sizes, derive=self.derive, sequence_parallel=overlay, progress=progress, share=share
            ),
            autocast=autocast,
        )


@dataclass(frozen=True)
class Decided:
    """The decision that all ranks act on.

    Args:
        program: the program that is applied; the one in `compiled` is before the changes for stages.
        layout: the layout of the stages, on a mesh with several pp ranks.
    """

    compiled: Compiled
    program: Program
    autocast: torch.dtype | None
    layout: Layout | None

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        return self.compiled.findings

    @property
    def derived(self) -> DerivedPlan | None:
        return self.compiled.given.derived


def program_or_raise(compiled: Compiled) -> Program:
    """The compiled program. Raises PlanError with the findings where there is none."""
    raise_errors(compiled.findings, compiled.given.sources)
    assert compiled.program is not None
    return compiled.program


def decide(
    asked: Asked, mesh: PlanMesh, stages: PipelineOptions | None, autocast_dtype: torch.dtype | str | None
) -> Decided:
    """Compile the plan for a mesh, and check that all ranks will do the same.

    Args:
        stages: how the stages run; None keeps the model whole.

    Raises:
        as `apply_plan`.
    """
    from shardplan.runtime.apply.agreement import intention, same_on_all_ranks
    from shardplan.runtime.apply.autocast import read_dtype

    with same_on_all_ranks(mesh.mesh) as agreement:
        compiled = asked.compiled(mesh.sizes, share=agreement.share, autocast=autocast_dtype is not None)
        program, layout = program_or_raise(compiled), None
        if stages is not None:
            program, layout = _laid_out(program, mesh, stages)
        mesh.check_sections(program.resolved)
        autocast = read_dtype(autocast_dtype, program.resolved.data_parallel)
        agreement.say(f"{intention(program)}\nautocast {autocast}")
        if stages is not None and layout is not None:
            agreement.say(f"\n{layout.cut}\n{layout.schedule.name} {stages.micro_batches}")
    return Decided(compiled, program, autocast, layout)


def _laid_out(program: Program, mesh: PlanMesh, stages: PipelineOptions) -> tuple[Program, Layout]:
    """The program changed for stages, and the layout of the stages."""
    from shardplan.runtime.pipeline.layout_of_stages import lay_out
    from shardplan.runtime.pipeline.refused_plans import for_stages

    section = program.resolved.data_parallel
    wrapped = section is not None and mesh.data_parallel(BACKENDS[section.backend]) is not None
    program = for_stages(program, wrapped=wrapped)
    return program, lay_out(mesh, program.resolved, stages.record, stages.stages_per_rank, stages.micro_batches)


def prove_decided(
    asked: Asked, decided: Decided, mesh: DeviceMesh, *, prove: bool
) -> tuple[tuple[Diagnostic, ...], str]:
    """Prove what the program splits over tp or ep, and the stages; the mesh's first rank does it for all. Returns the
    warnings, and in words how the program is known to be right.

    Raises:
        PlanError: the proof found errors.
    """
    from shardplan.proof.prove_stages import prove_stages_on_first_rank
    from shardplan.proof.stage import EARLIER, Question, prove_on_first_rank, prove_whole_on_first_rank
    from shardplan.runtime.apply.agreement import same_on_all_ranks

    compiled, resolved = decided.compiled, decided.program.resolved
    reduced, staged, sources = compiled.reduced_model, compiled.staged, compiled.given.sources
    split = (resolved.sizes.tp or 1) > 1 or bool(resolved.overlays & BESIDE_TP)
    if not prove or reduced is None:
        unproven = "it cannot be (allow_unproven)" if prove else "prove=False"
        return (), f"not proven: {unproven}" if split else WHOLE
    plan, logits = compiled.given.both[1], asked.changes.logits
    question = Question(
        reduced, asked.model, plan, logits, asked.allow_unproven, resolved.sizes, autocast=decided.autocast
    )
    if split:
        found, method = prove_on_first_rank(question, resolved.overlays, mesh)
    else:
        found, method = prove_whole_on_first_rank(question, resolved.overlays, mesh), ""
    with same_on_all_ranks(mesh):
        raise_errors(found, sources, strict=asked.strict)
    proof = f"proven {method}, on a reduced model" if split else WHOLE
    if staged is not None and staged.ok:
        assert decided.layout is not None  # this mesh has stages
        about, how = prove_stages_on_first_rank(question, staged, resolved.overlays, decided.layout.schedule, mesh)
        with same_on_all_ranks(mesh):
            raise_errors(about, sources, strict=asked.strict)
        method = method if split and how == EARLIER else how
        proof = f"proven {method}, on a reduced model"
    return found, proof
