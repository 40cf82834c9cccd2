"""The best configurations of a model on a number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from shardplan.compiler.pipeline import Compiled, compile_variant
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model, plan_name
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import Axis, MeshSizes

from .apply import program_or_raise
from .deriving import deriving
from .keywords import ModelOptions, PlanOptions, model_of, split_options

if TYPE_CHECKING:
    from shardplan.compiler.lower.program import Program
    from shardplan.core.estimates import Device, Estimate, OptimizerName, Precision, TrainingStep
    from shardplan.core.fits import Checkpointing, Choice, Fit, Fitted
    from shardplan.cost.fit_screening import Screened, Table

MIXED: dict[str, Any] = {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}}
TRIES = 3  # how many times as many configurations as are asked for are estimated, until enough of them fit
FULLEST = 0.95  # of a device's memory


class FitOptions(ModelOptions, PlanOptions, total=False):
    """Keyword arguments of `fit`."""


def fit(
    model: AnyModel,
    plan: AnyPlan = "auto",
    *,
    gpus: int,
    device: Device | str,
    global_batch: int,
    seq_len: int,
    precision: Precision = "fp32",
    optimizer: OptimizerName = "adamw",
    best: int = 5,
    tokens: float | None = None,
    efficiency: tuple[float, float] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    found_row: Callable[[Fitted], None] = lambda row: None,
    **options: Unpack[FitOptions],
) -> Fit:
    """The configurations of a training step that take the least time on a number of devices: mesh (pp, dp_replicate, dp_shard, tp),
    micro-batch, activation checkpointing, layout of the logits, schedule. Many are compared by what the parts of the model cost; the
    best, one for each mesh, are estimated as by `estimate`, and those that fit the device are returned.

    Args:
        model, plan, derive, inputs, reduced, settings, trust_remote_code: as for `validate`.
        gpus: how many devices.
        device: as for `estimate`.
        global_batch: sequences of a step on all devices. Micro-batches follow from it.
        seq_len: tokens of a sequence.
        precision: of stored parameters, gradients and the optimizer's state; with fp32, products are in bfloat16.
        optimizer: as for `estimate`.
        best: how many configurations.
        tokens: of the whole training, for `Fit.days`.
        efficiency: the least and the most of the bound's speed that was measured on such devices; None: as the device's file says.
        progress: called with what is being done.
        found_row: called with each configuration that fits, when it is estimated.

    Raises:
        PlanError: no size of tp allows the plan.
        ValueError: a wrong argument; a model without repeated layers; no configuration fits.
    """
    from shardplan.core.estimates import Question, TrainingStep
    from shardplan.core.fits import Fit
    from shardplan.cost.devices import read_device

    of_model, of_plan = split_options("fit", options, ModelOptions, PlanOptions)
    named = model_of(model, of_model)
    known = read_device(device) if isinstance(device, str) else device
    _check(gpus, global_batch, best, efficiency or known.efficiency)
    step = TrainingStep(seq_len, precision="bf16" if precision == "fp32" else precision, optimizer=optimizer)
    asked = Question(named.shown, plan_name(plan), False, step)
    search = Search(named, plan, of_plan, asked, known, progress)
    refused: dict[str, str] = {}
    screened = list(search.screened(gpus, global_batch, precision, refused))
    fitting = sorted((one for one in screened if one.memory <= FULLEST * known.memory), key=lambda one: one.key)
    if not fitting:
        least = min((one.memory for one in screened), default=0)
        why = (
            f"the least that a configuration needs is {least / 1e9:.1f} GB"
            if screened
            else "no mesh has such micro-batches"
        )
        raise ValueError(f"nothing fits {gpus} {known.name} ({known.memory / 1e9:.0f} GB): {why}")
    rows: list[Fitted] = []
    seen: set[MeshSizes] = set()
    for one in fitting:
        if len(rows) == best or len(seen) == best * TRIES:
            break
        if one.choice.sizes not in seen:
            seen.add(one.choice.sizes)
            row = search.fitted(one.choice, precision)
            if row is not None:
                rows.append(row)
                found_row(row)
    if not rows:
        raise ValueError(
            f"nothing fits {gpus} {known.name}: the {len(seen)} best meshes were estimated, and need more memory"
        )
    return Fit(
        gpus=gpus,
        rows=tuple(sorted(rows, key=lambda row: (float(f"{row.seconds:.3g}"), sum(_terms(row.estimate).values())))),
        screened=len(screened),
        too_large=len(screened) - len(fitting),
        refused=tuple(refused.items()),
        efficiency=efficiency or known.efficiency,
        tokens=tokens,
        derived=search.derived,
    )


def _terms(estimate: Estimate) -> Mapping[Any, float]:
    assert estimate.bound is not None
    return estimate.bound.terms


def _check(gpus: int, global_batch: int, best: int, efficiency: tuple[float, float] | None) -> None:
    for name, value in (("gpus", gpus), ("global_batch", global_batch), ("best", best)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if efficiency is not None and not 0 < efficiency[0] <= efficiency[1] <= 1:
        raise ValueError(
            f"efficiency must be two shares of the bound, the least first, above 0 and at most 1, not {efficiency}"
        )


class Search:
    """Compiled programs and traced parts of a model, each made once."""

    def __init__(
        self,
        model: Model,
        plan: AnyPlan,
        of_plan: PlanOptions,
        asked: Any,
        device: Device,
        progress: Callable[[str], None],
    ) -> None:
        self.model, self.plan, self.of_plan, self.asked, self.device = model, plan, of_plan, asked, device
        self.progress = progress
        self.derived: Any = None
        self._compiled: dict[tuple[int, bool], tuple[Compiled, Program]] = {}
        self._token = 0.0
        self._stages = True

    @property
    def _step(self) -> TrainingStep:
        return self.asked.step

    def screened(self, gpus: int, rows: int, precision: Precision, refused: dict[str, str]) -> Iterator[Screened]:
        """Every configuration, nearly.

        Args:
            refused: is told what is not searched, and why.
        """
        from shardplan.cost.fit_screening import Bytes, choices, screen
        from shardplan.cost.mesh_candidates import meshes_of

        wide = precision == "fp32"
        states = {"adamw": 2, "sgd": 0, "none": 0}[self._step.optimizer] * (4 if wide else 2)
        width = Bytes(4, 2, 4, states) if wide else Bytes(2, 2, 2, states)
        sizes = [n for n in range(1, min(gpus, self.device.node_gpus) + 1) if gpus % n == 0]
        error: PlanError | None = None
        any_size = False
        for tp in sizes:
            try:
                self._program(tp, False, refused)
            except PlanError as raised:
                error = error or raised
                refused[f"tp {tp}"] = _first(raised)
                continue
            any_size = True
            stages = [n for n in (1, 2, 4, 8, 16) if gpus // tp % n == 0] if self._stages else [1]
            meshes = [m for m in meshes_of(gpus, pp=[n for n in stages if gpus % n == 0]) if m.tp == tp]
            for checkpointing, sharded, table in self._tables(tp, refused):
                for mesh in meshes:
                    made = choices(
                        mesh,
                        rows,
                        checkpointing=checkpointing,
                        sequence_parallel=self._sequence(tp),
                        sharded=sharded,
                        regather=False,
                    )
                    for choice in made:
                        if (one := screen(choice, table, width, self.device)) is not None:
                            yield one
        if not any_size:
            assert error is not None
            raise error

    def fitted(self, choice: Choice, precision: Precision) -> Fitted | None:
        """The estimate of a configuration; None where it does not fit after all, or is refused."""
        from shardplan.compiler.check import check
        from shardplan.core.fits import Fitted
        from shardplan.core.sources import SourceMap
        from shardplan.cost.estimate import estimate_mesh
        from shardplan.cost.pipeline_estimate import Unschedulable
        from shardplan.report.errors import raise_errors

        compiled, program = self._program(choice.sizes.of(Axis.TP), choice.sharded_logits, {})
        resolved = replace(_checkpointed(program, choice.checkpointing).resolved, sizes=choice.sizes)
        step = replace(
            self._step,
            micro_batch=choice.micro_batch,
            micro_batches=choice.micro_batches,
            precision=precision,
            schedule=choice.schedule or "1f1b",
        )
        asked = replace(self.asked, sequence_parallel=choice.sequence_parallel, step=step)
        found, _ = compiled.given.both
        try:
            raise_errors(check(resolved, seq_len=step.seq_len), SourceMap())
            made = estimate_mesh(found, replace(program, resolved=resolved), asked, self.device, self.progress)
        except (PlanError, Unschedulable):
            return None
        return Fitted(choice, made, self._token) if made.fits else None

    def _sequence(self, tp: int) -> bool:
        return self._compiled[tp, False][1].resolved.sequence_parallel

    def _program(self, tp: int, sharded: bool, refused: dict[str, str]) -> tuple[Compiled, Program]:
        """With the plan's overlay where it allows that, its stages, every block checkpointed, and FSDP2."""
        if (tp, sharded) in self._compiled:
            return self._compiled[tp, sharded]
        self.progress(f"compiling for tp {tp}")
        last: PlanError | None = None
        for overlay in (True, False) if tp > 1 else (False,):
            for stages in (2, 1) if self._stages else (1,):
                try:
                    made = self._compile(tp, sharded, overlay, stages)
                except PlanError as error:
                    last = error
                    continue
                if stages == 1 and self._stages and last is not None:
                    self._stages = False
                    refused["pp"] = _first(last)
                if tp > 1 and not overlay and last is not None:
                    refused[f"sequence parallelism, tp {tp}"] = _first(last)
                self._compiled[tp, sharded] = made
                return made
        assert last is not None
        raise last

    def _compile(self, tp: int, sharded: bool, overlay: bool, stages: int) -> tuple[Compiled, Program]:
        sizes = MeshSizes(tp=tp, dp_shard=2, pp=stages)
        derive = deriving(self.model, self.of_plan, sizes, sequence_parallel=overlay, progress=self.progress)
        compiled = compile_variant(
            self.model,
            sizes,
            self.plan,
            {
                "sequence_parallel": overlay,
                "logits": "sharded" if sharded else "plan",
                "data_parallel": MIXED if self._step.precision == "bf16" else True,
                "activation_checkpointing": {"mode": "full"},
            },
            seq_len=self._step.seq_len,
            allow_unproven=True,
            derive=derive,
        )
        program = program_or_raise(compiled)
        self.derived = compiled.given.derived or self.derived
        return compiled, program

    def _tables(self, tp: int, refused: dict[str, str]) -> Iterator[tuple[Checkpointing, bool, Table]]:
        """The parts for each way of checkpointing; logits that are split change the last part alone."""
        from shardplan.cost.traced_parts import LAST, SHARED

        compiled, program = self._program(tp, False, refused)
        head: Mapping[str, Any] | None = None
        if tp > 1:
            try:
                split = self._table(tp, "none", *self._program(tp, True, refused))
                head = {part: split.costs[part] for part in (LAST, SHARED) if part in split.costs}
            except (PlanError, ValueError) as error:
                refused[f"sharded logits, tp {tp}"] = _first(error)
        for checkpointing in ("none", "selective", "full"):
            table = self._table(tp, checkpointing, compiled, program)
            if tp == 1 and checkpointing == "none":
                costs = [*(table.costs[table.depths.like(name)] for name in table.blocks)]
                costs += [one for name, one in table.costs.items() if name not in compiled.given.both[0].tree.modules]
                self._token = sum(one.flops for one in costs) / self._step.seq_len
            yield checkpointing, False, table
            if head is not None:
                yield checkpointing, True, replace(table, costs={**table.costs, **head})

    def _table(self, tp: int, checkpointing: Checkpointing, compiled: Compiled, program: Program) -> Table:
        from shardplan.cost.depth import cut, depths_of
        from shardplan.cost.fit_screening import Table
        from shardplan.cost.step_ledgers import step_ledger
        from shardplan.cost.traced_parts import PartNames

        found, _ = compiled.given.both
        program = _checkpointed(program, checkpointing)
        alone = replace(program.resolved, sizes=MeshSizes(tp=tp), data_parallel=None, dp_units=(), dp_parts=())
        program = replace(program, resolved=alone)
        depths = depths_of(found, program)
        if not depths.lists:
            raise ValueError(f"{found.name} has no repeated layers that fit could put together: use estimate --sweep")
        blocks = alone.pp_blocks or tuple(f"{depths.lists[0]}.{i}" for i in range(depths.count))
        names = PartNames.of(alone) if alone.pp_blocks else PartNames(blocks, (), ())
        self.progress(f"tracing tp {tp}, checkpointing {checkpointing}")
        shorten = partial(cut, depths=depths, depth=depths.traced[-1])
        ledger = step_ledger(found, program, self.asked, shorten=shorten, names=names)
        return Table(blocks, depths, ledger.parts, bool(alone.pp_blocks))


def _checkpointed(program: Program, how: Checkpointing) -> Program:
    """A program whose blocks are checkpointed, with another way of it."""
    resolved = program.resolved
    section = resolved.activation_checkpointing
    if how == "none" or section is None:
        return replace(program, resolved=replace(resolved, activation_checkpointing=None, ac_modules=()))
    return replace(program, resolved=replace(resolved, activation_checkpointing=replace(section, mode=how)))


def _first(error: Exception) -> str:
    if not isinstance(error, PlanError):
        return str(error)
    return next(d for d in error.diagnostics if d.is_error).message
