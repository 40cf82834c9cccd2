"""The record of an applied plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardplan.compiler.lower.expected_collectives import expected_collectives
from shardplan.compiler.lower.program import Program
from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.diagnostics import Diagnostic
from shardplan.core.plan import ResolvedPlan, variant_name, without_sequence
from shardplan.model.adapters import unwrapped
from shardplan.runtime.parallel.async_tp import Fused
from shardplan.runtime.parallel.random_streams import Streams
from shardplan.runtime.parallel.regime import Shared

from .backends import FUNCTIONS
from .fsdp2 import reshard
from .model_parts import Parted, parts_of
from .plan_mesh import PlanMesh
from .slices import Packing
from .state import keep_optimizer_order, packed_parameters

_KEY = "_shardplan_applied"


@dataclass(frozen=True)
class Applied:
    """The record of an `apply_plan`.

    Args:
        program: the compiled plan.
        diagnostics: the warnings from compiling it.
        steps: the phases that ran, in order.
        model: what `apply_plan` returned.
        shared: the switches of the tensor-parallel styles; None where tp is 1.
        mesh: the mesh that the plan was applied on.
        fused: the result of asynchronous tensor parallelism; None without it.
        proof: in words, how the plan is known to be right, or why it is not proven.
        derived: the plan, if `auto` derived it.
        streams: the random numbers that the model's modules draw; None where tp is 1, or they draw none.
    """

    program: Program
    diagnostics: tuple[Diagnostic, ...]
    steps: tuple[str, ...]
    model: nn.Module
    shared: Shared | None
    mesh: PlanMesh
    fused: Fused | None = None
    proof: str = "not proven"
    streams: Streams | None = None
    derived: DerivedPlan | None = None

    def __str__(self) -> str:
        """The receipt for a run's log: one fact a line. The bytes are this rank's."""
        resolved, sizes = self.program.resolved, self.mesh.sizes
        lines = [
            f"plan {resolved.plan.name} on {sizes.text() or 'one rank'}: {', '.join(self.steps) or 'nothing to do'}"
        ]
        if self.derived is not None:
            lines += self.derived.lines
        if self.tp > 1:
            lines += [f"variants: {', '.join(self.program.by_name)}", self.proof]
        if "data parallel" in self.steps:
            lines.append(f"data parallel: {data_parallel_text(resolved)}")
        lines.append(f"parameters: {parameters_text(self.model)}")
        if self.tp > 1:
            lines += [f"tp collectives of a step, {when}: {counted(c)}" for when, c in self.collectives.items()]
            lines.append(
                f"weights whose gradients are computed during the reduction of their input's: {len(self.overlapped)}"
            )
        lines += [f"{d.severity}[{d.code}]: {d.message}" for d in self.diagnostics]
        return "\n  ".join(lines)

    @property
    def tp(self) -> int:
        """The size of the tp axis."""
        return self.mesh.tp_size

    @property
    def collectives(self) -> Mapping[str, Counter[str]]:
        """The collectives of one step on the tp axis, by direction ("forward", "backward"): `expected_collectives`."""
        if self.shared is None:
            return {"forward": Counter(), "backward": Counter()}
        return expected_collectives(self.program.by_name[self.shared.regime.variant])

    @property
    def overlapped(self) -> tuple[str, ...]:
        """The linear layers whose weights' gradients are computed while the gradient of their input is reduced, by name. They were chosen when
        the plan was applied (`leave_weights`). Compiled modules leave the order to inductor."""
        return () if self.shared is None else tuple(self.shared.overlapped.get(self.shared.regime.variant, ()))

    @property
    def async_collectives(self) -> Mapping[str, Counter[str]]:
        """The result of asynchronous tensor parallelism in the graphs compiled so far: "fused" counts the operators of
        collectives fused with products, "left" the unchanged collectives.

        Raises:
            ValueError: the plan does not use it, or no step has run yet.
        """
        if self.fused is None:
            raise ValueError("the plan has no `compile: {async_tensor_parallel: true}`")
        if not self.fused.graphs:
            raise ValueError("nothing is compiled yet: run a step first")
        return {"fused": self.fused.fused, "left": self.fused.left}

    def seed(self, seed: int) -> None:
        """Restart the model's random numbers. Call it on all ranks with the same seed. It does nothing for a model that
        draws none under tensor parallelism."""
        if self.streams is not None:
            self.streams.seed, self.streams.calls = seed, 0

    def reshard(self) -> None:
        """Put sharded parameters back where FSDP2 left gathered ones."""
        reshard(self.model)

    def check_optimizer(self, optimizer: Optimizer, others: Iterable[Tensor] = ()) -> None:
        """Check that the optimizer holds this model's parameters. An optimizer made before `apply_plan` would update tensors
        that the model no longer has.

        Args:
            others: tensors of the model's other parts.

        Raises:
            ValueError: some of its tensors are not parameters of the model; the message says how many.
        """
        reshard(self.model)
        alive = {id(p) for p in (*self.model.parameters(), *others)}
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        dead = [p for p in tensors if id(p) not in alive]
        if dead:
            raise ValueError(
                f"{len(dead)} of the optimizer's {len(tensors)} tensors are not parameters of the model (shapes "
                f"{', '.join(str(tuple(p.shape)) for p in dead[:3])}{', ...' if len(dead) > 3 else ''}): "
                "apply_plan replaces parameters, so create the optimizer after it"
            )

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Adapt the optimizer to the plan's data-parallel backend, and return the same object. Only Megatron-FSDP changes it,
        to fit its wrapper.

        Raises:
            ValueError: the optimizer holds tensors that are not parameters of the model.
        """
        self.check_optimizer(optimizer)
        section = self.program.resolved.data_parallel
        if section is None or "data parallel" not in self.steps:
            return optimizer
        return FUNCTIONS[section.backend].optimizer(optimizer)

    def keep_checkpoints_portable(self, optimizer: Optimizer, others: Sequence[Applied] = ()) -> None:
        """Make the optimizer's state_dict write packed rows in the original order, as the model's does: a run with another
        size of tp can then read the checkpoint. Its load_state_dict accepts whole tensors, and those of other meshes.

        Args:
            others: the records of the model's other parts.

        Raises:
            ValueError: the optimizer holds tensors that are not parameters of the model.
        """
        self.check_optimizer(optimizer, [p for one in others for p in one.model.parameters()])
        packings: dict[int, Packing] = {}
        for record in (self, *others):
            record.reshard()
            packed = packed_parameters(record.program) if self.tp > 1 else {}
            named = unwrapped(record.model).named_parameters()
            packings |= {id(p): packed[name] for name, p in named if name in packed}
        keep_optimizer_order(optimizer, packings, self.tp)


@dataclass(frozen=True)
class AppliedParts:
    """The record of an `apply_plan` with stages.

    Args:
        title: the first line of its receipt.
        program: the compiled plan, of the whole model.
        mesh: the mesh that it was applied on.
        parts: the record of each part of this rank.
    """

    title: str
    program: Program
    mesh: PlanMesh
    parts: tuple[Applied, ...]

    def __str__(self) -> str:
        """The receipt for a run's log: the receipts of this rank's stages."""
        return "\n".join([self.title, *map(str, self.parts)])

    @property
    def tp(self) -> int:
        """The size of the tp axis."""
        return self.mesh.tp_size

    @property
    def proof(self) -> str:
        """In words, how the plan is known to be right, or why it is not proven."""
        return self.parts[0].proof

    def seed(self, seed: int) -> None:
        """`Applied.seed` of all parts."""
        for part in self.parts:
            part.seed(seed)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """`Applied.check_optimizer` for the parameters of this rank's parts."""
        self.parts[0].check_optimizer(optimizer, self._others)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """`Applied.wrap_optimizer`."""
        self.check_optimizer(optimizer)
        return optimizer  # the backends of pipeline stages need nothing

    def keep_checkpoints_portable(self, optimizer: Optimizer) -> None:
        """`Applied.keep_checkpoints_portable`."""
        self.parts[0].keep_checkpoints_portable(optimizer, self.parts[1:])

    @property
    def _others(self) -> Iterable[Tensor]:
        for part in self.parts[1:]:
            part.reshard()
            yield from part.model.parameters()


def remember(record: Applied, model: nn.Module) -> None:
    """Attach the record to the model, and where they exist, to the model inside peft's wrapper and to the wrapper of the
    data-parallel backend."""
    unwrapped(model).__dict__[_KEY] = model.__dict__[_KEY] = record
    record.model.__dict__[_KEY] = record


def mark_unusable(model: nn.Module, step: str, why: str | None = None) -> None:
    """Record why the model cannot be used any more: a step failed half-way, or another reason."""
    text = why or f"applying a plan failed in the step {step!r}; build it again"
    unwrapped(model).__dict__[_KEY] = model.__dict__[_KEY] = text


@overload
def applied(model: nn.Module) -> Applied: ...


@overload
def applied(model: Parted) -> AppliedParts: ...


@overload
def applied(model: nn.Module | Parted) -> Applied | AppliedParts: ...


def applied(model: nn.Module | Parted) -> Applied | AppliedParts:
    """What `apply_plan` did to a model, or to this rank's stages of a Pipeline: program, warnings, steps, expected collectives. It can be printed.

    Raises:
        ValueError: no plan was applied to the model, or applying one failed half-way.
    """
    if isinstance(model, Parted):
        record_of_parts: AppliedParts = model.record
        return record_of_parts
    record = model.__dict__.get(_KEY)
    if isinstance(record, str):
        raise ValueError(f"this model is unusable: {record}")
    if record is None:
        raise ValueError("no plan was applied to this model")
    return record


def was_touched(model: nn.Module) -> bool:
    """Whether `apply_plan` has changed the model before, completely or not."""
    return _KEY in model.__dict__ or _KEY in unwrapped(model).__dict__


@contextmanager
def without_sequence_parallel(model: nn.Module | Parted) -> Iterator[Any]:
    """Run the model, or all parts of a pipeline, with the moves of the plan without sequence parallelism: for evaluation and
    decoding, where tp does not divide the length of sequences.

    Raises:
        ValueError: no plan was applied to the model; it stores a packed parameter differently with and without sequence parallelism; or
            it exchanges heads over cp.
    """
    for record in map(applied, parts_of(model)):
        if record.program.exchanges_heads:
            raise ValueError(
                "modules with `exchange_heads` have the numbers of a rank's heads over cp, and cannot run without the exchange: "
                "apply the plan on a mesh without cp for decoding"
            )
        if unreadable := record.program.unreadable:
            raise ValueError(
                f"the plan stores {unreadable[0]} differently with sequence parallelism than without it ({len(unreadable)} in all), "
                "and a packed parameter is read only as it is stored: apply the plan without sequence parallelism for decoding"
            )
    switched = [(record, record.shared) for record in map(applied, parts_of(model)) if record.shared is not None]
    before = [shared.regime.variant for _, shared in switched]
    for record, shared in switched:
        shared.regime.variant = variant_name(without_sequence(record.program.resolved.overlays))
    try:
        yield model
    finally:
        for (_, shared), variant in zip(switched, before, strict=True):
            shared.regime.variant = variant


# Parts of the record of an applied plan as text, for the log of a run. Nothing is communicated.
def data_parallel_text(resolved: ResolvedPlan) -> str:
    """The backend, units and dtypes of a plan with a `data_parallel` section."""
    section = resolved.data_parallel
    assert section is not None
    parts = [section.backend, f"{len(resolved.dp_units)} units"]
    if (precision := section.mixed_precision) is not None:
        dtypes = (("param", precision.param), ("reduce", precision.reduce), ("output", precision.output))
        parts += [f"{name} {dtype}" for name, dtype in dtypes if dtype is not None]
    return ", ".join(parts)


def parameters_text(model: nn.Module) -> str:
    """The parameters' bytes on this rank and in all, and their dtypes."""
    whole = here = 0
    dtypes: dict[str, None] = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += parameter.numel() * parameter.element_size()
        here += local.numel() * local.element_size()
        dtypes[str(parameter.dtype).removeprefix("torch.")] = None
    return f"{here:,} of {whole:,} bytes on this rank, {', '.join(dtypes)}"


def counted(counter: Counter[str]) -> str:
    """`5 all_gather, 4 reduce_scatter`."""
    return ", ".join(f"{n} {op}" for op, n in sorted(counter.items())) or "none"
