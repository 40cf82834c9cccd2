"""The configurations that `fit` compares, and the estimates of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any

from shardplan.compiler.check import check
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.sources import SourceMap
from shardplan.report.errors import raise_errors

from .fit_programs import Programs, first_error, no_experts

if TYPE_CHECKING:
    from shardplan.core.estimates import Device, Precision, Question, TrainingStep
    from shardplan.core.fits import Checkpointing, Choice, Fitted
    from shardplan.cost.fit_screening import Bytes, Screened, Table

STAGES = (1, 2, 4, 8, 16)
CONTEXT = (2, 4)  # the cp sizes that are traced; others are read off the line through them
LARGEST_CP = 64
WAYS: tuple[Checkpointing, ...] = ("none", "selective", "full")


class Search:
    """Args:
    asked: the question and its step, whose precision is that of matrix products. rows: sequences of a step on all devices.
    axes: the sizes that are compared, by axis; every size is compared for an axis that is left out. precision: the precision
    of stored values. advance: called with the number of parts of the work that are done, and the number of all parts.
    """

    def __init__(
        self,
        programs: Programs,
        asked: Question,
        device: Device,
        gpus: int,
        rows: int,
        axes: Mapping[Axis, tuple[int, ...]],
        precision: Precision,
        progress: Callable[[str], None],
        advance: Callable[[int, int], None],
    ) -> None:
        self.programs, self.asked, self.device = programs, asked, device
        self.gpus, self.rows, self.axes = gpus, rows, axes
        self.precision, self.progress = precision, progress
        self._advance, self._done, self._total = advance, 0, 1
        self.flops_of_a_token = 0.0
        self._experts = True  # whether the plan may distribute some
        self._allowed: dict[int, bool] = {}  # tp sizes, and whether the sequence-parallel section is on

    @property
    def _step(self) -> TrainingStep:
        return self.asked.step

    @property
    def _refused(self) -> dict[str, str]:
        return self.programs.refused

    def plan_for(self, parts: int) -> None:
        self._total += parts
        self._advance(self._done, self._total)

    def did(self, parts: int = 1) -> None:
        self._done += parts
        self._advance(min(self._done, self._total), self._total)

    def usual(self) -> Iterator[Screened]:
        """Every mesh without cp, micro-batch, checkpointing, layout of the logits and schedule.

        Raises:
            PlanError: no size of tp allows the plan.
        """
        error: PlanError | None = None
        within = range(1, min(self.gpus, self.device.node_gpus) + 1)
        sizes = [n for n in self.axes.get(Axis.TP, within) if self.gpus % n == 0]
        self.plan_for(7 * len(sizes))
        for tp in sizes:
            try:
                program = self.programs.compiled(tp).program
            except PlanError as raised:
                error = error or raised
                self._refused[f"tp {tp}"] = first_error(raised)
                self.did(7)
                continue
            assert program is not None
            self._allowed[tp] = program.resolved.sequence_parallel
            yield from self._combined(tp, self._tables(MeshSizes(tp=tp)))
            yield from self._with_experts(tp)
        if not self._allowed:
            assert error is not None
            raise error

    def sparing(self) -> Iterator[Screened]:
        """Choices that save memory and take more time: `regather`, and sequences split over cp."""
        self.plan_for(6 * len(self._allowed))
        for tp, overlay in self._allowed.items():
            if tp > 1 and overlay:
                for way in WAYS[:2]:
                    table = self.programs.table(MeshSizes(tp=tp), way, regather=True)
                    self.did()
                    yield from self._screened(self._meshes(tp), table, way, regather=True)
            yield from self._with_context(tp)

    def offloaded(self) -> Iterator[Screened]:
        """Parameters, gradients and states in the host's memory."""
        for tp in self._allowed:
            for way in WAYS:
                table = self.programs.table(MeshSizes(tp=tp), way)
                yield from self._screened(self._meshes(tp), table, way, offload=True)

    def fitted(self, choice: Choice) -> Fitted | None:
        """The estimate of a configuration; None where it does not fit after all, or the plan refuses it."""
        from shardplan.core.fits import Fitted
        from shardplan.cost.estimate import estimate_mesh
        from shardplan.cost.pipeline_estimate import Unschedulable

        step = replace(
            self._step,
            micro_batch=choice.micro_batch,
            micro_batches=choice.micro_batches,
            precision=self.precision,
            schedule=choice.schedule or "1f1b",
        )
        asked = replace(self.asked, sequence_parallel=choice.sequence_parallel, step=step)
        try:
            compiled, program = self.programs.program(choice)
            raise_errors(check(program.resolved, seq_len=step.seq_len), SourceMap())
            found, _ = compiled.given.both
            made = estimate_mesh(found, program, asked, self.device, self.progress)
        except (PlanError, Unschedulable):
            return None
        if not made.fits:
            return None
        return Fitted(choice, made, self.flops_of_a_token)

    def _meshes(self, tp: int, ep: int = 1, cp: int = 1) -> list[MeshSizes]:
        from shardplan.cost.mesh_candidates import meshes_of

        known = self.axes.get(Axis.PP, STAGES)
        stages = [n for n in known if self.gpus // tp % n == 0] if self.programs.stages and cp == 1 else [1]
        try:
            every = [m for m in meshes_of(self.gpus, (ep,), stages, (cp,)) if m.tp == tp]
            return [m for m in every if all(m.of(axis) in sizes for axis, sizes in self.axes.items())]
        except ValueError:  # ep does not fit this mesh
            return []

    def _screened(self, meshes: list[MeshSizes], table: Table, way: Checkpointing, **what: bool) -> Iterator[Screened]:
        from shardplan.cost.fit_screening import choices, screen

        for mesh in meshes:
            made = choices(
                mesh,
                self.rows,
                checkpointing=way,
                sequence_parallel=self._allowed[mesh.tp or 1],
                sharded=what.get("sharded", False),
                regather=what.get("regather", False),
                offload=what.get("offload", False),
            )
            for choice in made:
                if (one := screen(choice, table, self._width, self.device, self._owners)) is not None:
                    yield one

    @property
    def _width(self) -> Bytes:
        from shardplan.cost.fit_screening import Bytes

        wide = self.precision == "fp32"
        optimizer, stored = self._step.optimizer, 4 if wide else 2
        # For Muon, only the momentum of the matrices is counted here: the estimates of the best count all other states.
        states = {"sgd": 0, "none": 0, "muon": stored, "whole-matrix": stored}.get(optimizer, 2 * stored)
        return Bytes(stored, 2, stored, states, stored if optimizer == "adamw" else 0)

    @cached_property
    def _owners(self) -> int:
        from shardplan.cost.muon_step import owners_work

        if self._step.optimizer != "muon":
            return 0
        return owners_work(self.programs.model.find(), self.programs.matrices)

    def _combined(
        self, tp: int, tables: Iterator[tuple[Checkpointing, bool, Table]], meshes: list[MeshSizes] | None = None
    ) -> Iterator[Screened]:
        for way, sharded, table in tables:
            yield from self._screened(self._meshes(tp) if meshes is None else meshes, table, way, sharded=sharded)

    def _tables(self, sizes: MeshSizes) -> Iterator[tuple[Checkpointing, bool, Table]]:
        """The parts for each kind of checkpointing; split logits change only the last part."""
        from shardplan.cost.traced_parts import LAST, SHARED

        tp = sizes.tp or 1
        head: Mapping[str, Any] = {}
        if tp > 1:
            try:
                split = self.programs.table(sizes, "none", sharded=True)
                head = {part: split.costs[part] for part in (LAST, SHARED) if part in split.costs}
            except (PlanError, ValueError) as error:
                self._refused[f"sharded logits, tp {tp}"] = first_error(error)
        self.did()
        for way in WAYS:
            table = self.programs.table(sizes, way)
            if way == "none" and not self.flops_of_a_token:
                self.flops_of_a_token = self._flops(table, tp)
            self.did()
            yield way, False, table
            if head:
                yield way, True, replace(table, costs={**table.costs, **head})

    def _flops(self, table: Table, tp: int) -> float:
        own = {table.depths.like(name) for name in table.blocks}
        costs = [table.costs[table.depths.like(name)] for name in table.blocks]
        blocks = {f"{listed}.{i}" for listed in table.depths.lists for i in range(table.depths.count)}
        costs += [one for name, one in table.costs.items() if name not in own | blocks]
        return tp * sum(one.flops for one in costs) / self._step.seq_len

    def _with_experts(self, tp: int) -> Iterator[Screened]:
        """The ep sizes that tp divides. One is traced, within a node where that is possible; the others follow from it."""
        from shardplan.cost.fit_tables import of_experts

        given = self.axes.get(Axis.EP, range(2, self.gpus + 1))
        sizes = [n for n in given if n >= max(2, tp) and self.gpus % n == 0 and n % tp == 0]
        if not self._experts or not sizes:
            self.did(3)
            return
        node = self.device.node_gpus
        why: PlanError | None = None
        for traced in sorted(sizes, key=lambda n: (n > node, -n if n <= node else n)):
            try:
                program = self.programs.compiled(tp, ep=traced).program
            except PlanError as error:
                if no_experts(error):
                    # Without tp, the sequence-parallel section was not tried; a derived plan may differ with tp.
                    self._experts = tp == 1 or self.programs.derives
                    self.did(3)
                    return
                why = why or error
                continue
            assert program is not None
            self.programs.experts[tp] = traced
            count = gcd(*(one.experts.count for one in program.modules.values() if one.experts is not None))
            from_mesh = MeshSizes(tp=tp, dp_shard=traced // tp, ep=traced)
            for way in WAYS:
                table = self.programs.table(from_mesh, way)
                self.did()
                for ep in (n for n in sizes if not count % n):
                    made = table if ep == traced else of_experts(table, traced, ep)
                    yield from self._screened(self._meshes(tp, ep), made, way)
            return
        if why is not None:
            self._refused[f"ep, tp {tp}"] = first_error(why)
        self.did(3)

    def _with_context(self, tp: int) -> Iterator[Screened]:
        """Sequences split over cp: two sizes are traced, the others follow from them."""
        from shardplan.cost.fit_tables import of_context

        length = self._step.seq_len
        known = self.axes.get(Axis.CP, range(2, LARGEST_CP + 1))
        sizes = [n for n in range(2, LARGEST_CP + 1) if self.gpus // tp % n == 0 and not length % n]
        if not set(sizes) & set(known):
            self.did(4)
            return
        traced = [n for n in CONTEXT if n in sizes]
        ways = WAYS[1:] if len(traced) == len(CONTEXT) else ()
        if len(traced) == 1:
            sizes, ways = traced, WAYS[1:]
        try:
            for way in ways:
                tables = [self.programs.table(MeshSizes(tp=tp, cp=cp), way) for cp in traced]
                self.did(2)
                for cp in sizes:
                    table = tables[traced.index(cp)] if cp in traced else of_context(tables[0], tables[1], CONTEXT, cp)
                    yield from self._screened(self._meshes(tp, cp=cp), table, way)
        except PlanError as error:
            self._refused.setdefault("cp", first_error(error))
            self.did(4)
