"""The programs that `fit` compiles for a model, and the parts that it traces; each is made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardplan.compiler.check.expert_parallel import NO_EXPERTS
from shardplan.compiler.pipeline import Changes, Compiled
from shardplan.compiler.user_inputs import AnyPlan, FoundOnce, Model
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import MatrixParts

from .deciding import Asked, program_or_raise

if TYPE_CHECKING:
    from shardplan.compiler.lower.program import Program
    from shardplan.core.estimates import Question
    from shardplan.core.fits import Checkpointing, Choice
    from shardplan.cost.fit_screening import Table

MIXED: dict[str, Any] = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}


class Programs:
    """The programs of a model by the axis sizes that they depend on, and the cost tables of their parts.

    Args:
        asked: the question and its step, whose precision is that of matrix products.
        refused: called with what is not searched, and why.
        progress: called with what is being done.
    """

    def __init__(
        self,
        model: Model,
        plan: AnyPlan,
        asked: Question,
        refused: dict[str, str],
        progress: Callable[[str], None],
        *,
        derive: bool,
    ) -> None:
        self.model, self.plan, self.derive, self.asked = FoundOnce(**vars(model)), plan, derive, asked
        self.refused, self.progress = refused, progress
        self.derived: Any = None
        self.stages = True
        self.experts: dict[int, int] = {}  # sizes of tp -> the size of ep that was compiled
        self._compiled: dict[tuple[int, int, int], Compiled] = {}
        self._tables: dict[Any, Table] = {}

    @property
    def derives(self) -> bool:
        """Whether the whole plan is derived, once for each size."""
        return self.derived is not None and self.derived.extends is None

    def compiled(self, tp: int, *, ep: int = 1, cp: int = 1) -> Compiled:
        """Compile the plan with its stages, every block checkpointed, FSDP2 and, where the plan allows it, its sequence-parallel section.

        Raises:
            PlanError: the plan does not allow it.
        """
        key = (tp, ep, cp)
        if key in self._compiled:
            return self._compiled[key]
        self.progress(
            f"compiling for tp {tp}" + "".join(f", {axis} {n}" for axis, n in (("ep", ep), ("cp", cp)) if n > 1)
        )
        last: PlanError | None = None
        for overlay in (True, False) if tp > 1 else (False,):
            for stages in (2, 1) if self.stages and cp == 1 else (1,):
                try:
                    made = self._compile(MeshSizes(tp=tp, dp_shard=max(2, ep // tp), cp=cp, ep=ep, pp=stages), overlay)
                except PlanError as error:
                    last = error
                    if no_experts(error):
                        break  # with stages or without
                    continue
                if stages == 1 and self.stages and last is not None and cp == 1 and ep == 1:
                    self.stages = False
                    self.refused["pp"] = first_error(last)
                if tp > 1 and not overlay and last is not None and ep == 1 and cp == 1:
                    self.refused[f"sequence parallelism, tp {tp}"] = first_error(last)
                self._compiled[key] = made
                return made
        assert last is not None
        raise last

    @property
    def matrices(self) -> Mapping[str, MatrixParts]:
        """Those that the plan takes apart, which are the same at all sizes; something has been compiled."""
        program = next(iter(self._compiled.values())).program
        assert program is not None  # `compiled` raises its findings
        return program.resolved.matrices

    def program(self, choice: Choice) -> tuple[Compiled, Program]:
        """The program of a configuration, for its mesh. A plan that is not derived has one program for all ep sizes.

        Raises:
            PlanError, ValueError: the plan does not allow it.
        """
        sizes, ep = choice.sizes, choice.sizes.ep
        if ep > 1 and not self.derives:
            ep = self.experts.get(sizes.tp or 1, ep)
        compiled = self.compiled(sizes.tp or 1, ep=ep, cp=sizes.cp)
        program = checkpointed(
            _lowered(compiled, sharded=choice.sharded_logits, regather=choice.regather), choice.checkpointing
        )
        resolved = replace(program.resolved, sizes=sizes)
        if choice.offload:
            assert resolved.data_parallel is not None
            resolved = replace(resolved, data_parallel=replace(resolved.data_parallel, cpu_offload=True))
        return compiled, replace(program, resolved=resolved)

    def table(
        self,
        sizes: MeshSizes,
        checkpointing: Checkpointing,
        *,
        sharded: bool = False,
        regather: bool = False,
    ) -> Table:
        """The cost of the model's parts on one rank, for these sizes of tp, ep and cp and one sequence.

        Args:
            sharded: the logits are split. This changes only what is outside the layers, so a single layer is traced.

        Raises:
            PlanError, ValueError: the plan does not allow it; a model without repeated layers.
        """
        key = (sizes, checkpointing, sharded, regather)
        if key not in self._tables:
            compiled = self.compiled(sizes.tp or 1, ep=sizes.ep, cp=sizes.cp)
            program = checkpointed(_lowered(compiled, sharded=sharded, regather=regather), checkpointing)
            self._tables[key] = self._traced(compiled, program, sizes, checkpointing, depth=1 if sharded else None)
        return self._tables[key]

    def _compile(self, sizes: MeshSizes, overlay: bool) -> Compiled:
        changes = Changes(
            sequence_parallel=overlay,
            data_parallel=MIXED if self.asked.step.precision == "bf16" else {},
            activation_checkpointing={"mode": "full"},
        )
        asked = Asked(self.model, self.plan, changes, self.asked.step.seq_len, allow_unproven=True, derive=self.derive)
        compiled = asked.compiled(sizes, self.progress)
        program_or_raise(compiled)
        self.derived = compiled.given.derived or self.derived
        return compiled

    def _traced(
        self, compiled: Compiled, program: Program, sizes: MeshSizes, checkpointing: str, depth: int | None
    ) -> Table:
        from shardplan.cost.depth import cut, depths_of
        from shardplan.cost.fit_screening import Table
        from shardplan.cost.traced_parts import PartNames
        from shardplan.cost.traced_step import step_ledger

        found, _ = compiled.given.both
        alone = replace(
            program.resolved,
            sizes=sizes,
            data_parallel=None,
            dp_units=(),
            dp_parts=(),
            dp_experts=(),
            dp_ignored=frozenset(),
        )
        program = replace(program, resolved=alone)
        depths = depths_of(found, program, gathers=False)
        if not depths.lists:
            raise ValueError(
                f"{found.name} has no repeated layers that fit could put together: estimate the meshes that you mean"
            )
        blocks = alone.pp_blocks or tuple(f"{depths.lists[0]}.{i}" for i in range(depths.count))
        names = PartNames.of(alone) if alone.pp_blocks else PartNames(blocks, (), ())
        text = "".join(f", {axis} {size}" for axis, size in (("ep", sizes.ep), ("cp", sizes.cp)) if size > 1)
        self.progress(f"tracing tp {sizes.tp}{text}, checkpointing {checkpointing}")
        shorten = partial(cut, depths=depths, depth=depth or depths.traced[-1])
        asked = replace(
            self.asked, step=replace(self.asked.step, optimizer="none")
        )  # optimizer states are added for each mesh
        ledger = step_ledger(found, program, asked, shorten=shorten, names=names, unwrapped=True)
        return Table(blocks, depths, ledger.parts)


def _lowered(compiled: Compiled, *, sharded: bool, regather: bool) -> Program:
    if not sharded and not regather:
        assert compiled.program is not None
        return compiled.program
    return compiled.lowered(logits="sharded" if sharded else "plan", regather=regather or None)


def checkpointed(program: Program, how: Checkpointing) -> Program:
    """A program whose blocks are checkpointed, with another kind of checkpointing."""
    resolved = program.resolved
    section = resolved.activation_checkpointing
    if how == "none" or section is None:
        return replace(program, resolved=replace(resolved, activation_checkpointing=None, ac_modules=()))
    return replace(program, resolved=replace(resolved, activation_checkpointing=replace(section, mode=how)))


def no_experts(error: PlanError) -> bool:
    """Whether a plan was refused because it distributes no experts."""
    return any(d.code == NO_EXPERTS for d in error.diagnostics)


def first_error(error: Exception) -> str:
    if not isinstance(error, PlanError):
        return str(error)
    return next(d for d in error.diagnostics if d.is_error).message
