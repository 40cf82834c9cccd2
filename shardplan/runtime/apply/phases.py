"""The phases in their order, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardplan.compiler.check.parameter_hooks import hooked, replaces
from shardplan.compiler.lower.program import Program
from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import Axis
from shardplan.core.plan import variant_name, without_sequence
from shardplan.core.tree import ancestors, block, full_name
from shardplan.model.adapters import unwrapped
from shardplan.runtime.parallel.async_tp import Fused
from shardplan.runtime.parallel.direct_calls import OwnForward, hooks_of_parts, hooks_outside_of_units
from shardplan.runtime.parallel.failures import module_of
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.random_streams import Streams
from shardplan.runtime.parallel.regime import Regime, Shared
from shardplan.runtime.parallel.whole_scalars import meshes_of, store_scalars
from shardplan.styles.backends import BACKENDS
from shardplan.torchlib.hook_order import order_hooks

from .applied import Applied, mark_unusable, remember, was_touched
from .autocast import autocast_forward
from .backends import FUNCTIONS
from .checkpointing import checkpoint_modules
from .compilation import compile_modules
from .contract import check_unchanged, names_of
from .expert_units import check_experts
from .failed_steps import ALONE, OtherRankFailed, Ranks, refuse_forwards
from .fsdp2 import dtype_of
from .guards import Kind, guard
from .heads import fuse_heads, use_sharded_loss
from .kept_ties import restore_ties, tied_groups
from .marked_parameters import refuse_full_tensor
from .plan_mesh import PlanMesh
from .random_numbers import ByVariant, draws_of, streams_of, use_common_streams, use_own_streams
from .refusals import refuse_adapter_changes, refuse_changes
from .same_weights import drawn_apart
from .shard import shard
from .state import keep_original_order, load_any_layout, packed_parameters
from .unfit_models import refuse_scattered
from .watched import Looks, Watched
from .wrapped import Wrapped


@dataclass
class Work:
    """The state that the phases change."""

    model: nn.Module  # as the caller has it
    inner: nn.Module  # the model that the program is for: the same, or the one that peft wraps
    mesh: PlanMesh
    program: Program
    src_data_rank: int | None
    ranks: Ranks
    ties: tuple[tuple[str, ...], ...] = ()
    shared: Shared | None = None
    result: nn.Module | None = None
    fused: Fused | None = None
    autocast: torch.dtype | None = None
    draws: ByVariant = field(default_factory=dict)  # whose random numbers each module draws
    streams: Streams | None = None
    parts: Looks = field(default_factory=dict)
    calls: Regime | None = None  # which forward runs, where no values move and FSDP2 gathers parameters
    steps: list[str] = field(default_factory=list)
    bare: bool = False

    @property
    def split(self) -> bool:
        """Whether the model runs on several tp ranks."""
        return self.mesh.tp_size > 1

    @property
    def moves(self) -> bool:
        """Whether values move between modules: over tp or over cp."""
        return self.split or self.program.resolved.context_parallel

    @property
    def gathered_over(self) -> DeviceMesh | None:
        """The mesh over which FSDP2 shards parameters; None where it does not."""
        section = self.program.resolved.data_parallel
        if section is None or not BACKENDS[section.backend].fully_shard:
            return None
        return self.mesh.data_parallel(BACKENDS[section.backend])


def _fused_heads(work: Work) -> bool:
    return fuse_heads(work.inner, work.program, work.mesh.tp if work.split else None)


def _tensor_parallel(work: Work) -> bool:
    work.ties = tied_groups(work.inner)
    if not work.moves and work.gathered_over is not None:
        work.calls = Regime("")
        wrap_forward(work.inner, OwnForward(work.calls))
    if not work.moves and not work.program.experts:
        return False
    work.shared = shard(work.inner, work.mesh, work.program, src_data_rank=work.src_data_rank, ready=work.ranks.go_on)
    if work.moves:
        wrap_forward(work.inner, OwnForward(work.shared.regime))
    if work.split:
        use_sharded_loss(work.inner, work.program)
    return True


def _ties(work: Work) -> bool:
    restore_ties(work.inner, work.ties)
    return bool(work.ties)


def _checkpoints(work: Work) -> bool:
    packed = packed_parameters(work.program) if work.split else {}
    keep_original_order(work.inner, packed, work.mesh.tp_size)
    load_any_layout(work.inner, packed)
    return bool(packed)


def _scalars(work: Work) -> bool:
    """Wrap forwards that read scalars: outside of compiled forwards, and inside of checkpoints, whose second run reads the scalars again."""
    resolved = work.program.resolved
    section, mesh = resolved.data_parallel, work.gathered_over
    if section is None or mesh is None:
        return False
    around = frozenset((*resolved.fsdp_units, *resolved.ac_modules))

    def readers(home: str) -> Iterable[str]:
        return dict.fromkeys((home, *(m for m in ancestors(home) if m in around or m == block(home)), ""))

    meshes = meshes_of(mesh, work.mesh.tp if work.split else None, dtype_of(section.mixed_precision))
    return store_scalars(work.inner, readers, meshes, resolved.dp_ignored)


def _random_numbers(use: Callable[[nn.Module, ByVariant, Streams, Regime], None], work: Work) -> bool:
    if work.streams is None or work.shared is None or not work.split:
        return False
    use(work.inner, work.draws, work.streams, work.shared.regime)
    return True


def _activation_checkpointing(work: Work) -> bool:
    resolved, section = work.program.resolved, work.program.resolved.activation_checkpointing
    if section is not None:
        regime = work.shared.regime if work.shared is not None else None
        checkpoint_modules(work.inner, resolved.ac_modules, section, resolved.compile_modules, regime)
    return bool(resolved.ac_modules)


def _compile(work: Work) -> bool:
    resolved = work.program.resolved
    if resolved.compile is not None:
        work.fused = compile_modules(work.inner, resolved.compile_modules, resolved.compile, work.mesh.tp)
    return resolved.compile is not None


def _autocast(work: Work) -> bool:
    if work.autocast is not None:
        autocast_forward(work.model, work.mesh.mesh.device_type, work.autocast)
    return work.autocast is not None


def _data_parallel(work: Work) -> bool:
    resolved = work.program.resolved
    if not work.bare:
        work.mesh.check_sections(resolved)
    if resolved.data_parallel is None:
        return False
    backend = BACKENDS[resolved.data_parallel.backend]
    mesh = work.mesh.data_parallel(backend)
    if mesh is None:
        return False
    prefix = next(name for name, module in work.model.named_modules() if module is work.inner)
    over = work.mesh.experts_data_parallel(backend) if work.program.experts else None
    units, parts, ignored, experts, heads = (
        tuple(full_name(prefix, name) for name in names)
        for names in (
            resolved.dp_units,
            resolved.dp_parts,
            sorted(resolved.dp_ignored),
            work.program.experts,
            work.program.fused_heads,
        )
    )
    joint = work.mesh.joint(mesh) if backend.joint_group else None
    tp = work.mesh.names.get(Axis.TP)
    names = Wrapped(units, parts, ignored, experts, over, work.mesh.mesh, tp, joint, heads)
    work.result = FUNCTIONS[backend.name].model(work.model, mesh, resolved.data_parallel, names)
    assert (work.result is not work.model) == backend.wraps, f"the record of {backend.name} is wrong"
    return True


def _parts(work: Work) -> None:
    if work.shared is None:
        return
    program, regime = work.program, work.shared.regime
    numbers = "the numbers of modules whose heads are exchanged over cp" if program.exchanges_heads else ""
    regime.home, regime.unreadable = regime.variant, next(iter(program.unreadable), numbers)
    plain = variant_name(without_sequence(program.resolved.overlays))
    work.parts = hooks_of_parts(work.inner, work.model, program.by_name, plain, regime)
    if work.shared.link is not None:
        work.shared.link.watch(work.inner.get_submodule(m.name) for m in program.modules.values() if m.link == "source")


def _refusals(work: Work) -> bool:
    if work.moves:
        _parts(work)
    elif work.calls is not None:
        work.parts = hooks_outside_of_units(work.inner, work.model, work.calls)
    if work.split:
        refuse_full_tensor(work.inner, packed_parameters(work.program))
    if any(isinstance(parameter, DTensor) for parameter in work.inner.parameters()):
        for model in {id(model): model for model in (work.model, work.inner)}.values():
            refuse_changes(model)
        refuse_adapter_changes(work.model, work.inner)
    return False  # not a user's choice


def _replaces(work: Work) -> bool:
    """`check.parameter_hooks.replaces` for a mesh: FSDP2 replaces parameters even on an axis of size 1, and experts are
    distributed over ep."""
    section = work.program.resolved.data_parallel
    if replaces(work.program.resolved) or work.program.experts:
        return True
    if section is None:
        return False
    backend = BACKENDS[section.backend]
    return backend.shards and work.mesh.data_parallel(backend) is not None


# The order that works: heads inside of all else; styles first (they find modules by name); ties before FSDP2 (both names in one group); a
# checkpoint around the compiled forward (docs/decisions/0017) and around modules that draw a rank's own random numbers
# (docs/decisions/0017); FSDP2 last (its hooks outermost).
PHASES: tuple[tuple[str, Callable[[Work], bool]], ...] = (
    ("fused heads", _fused_heads),
    ("tensor parallel", _tensor_parallel),
    ("ties", _ties),
    ("packed checkpoints", _checkpoints),
    ("compile", _compile),
    ("scalars", _scalars),
    ("own random numbers", partial(_random_numbers, use_own_streams)),
    ("activation checkpointing", _activation_checkpointing),
    ("common random numbers", partial(_random_numbers, use_common_streams)),
    ("autocast", _autocast),
    ("data parallel", _data_parallel),
    ("refusals", _refusals),
)


def refuse_used(model: nn.Module) -> None:
    """Raise ValueError for a model with DTensors or an applied plan; it stays untouched."""
    if was_touched(model):
        raise ValueError("a plan was applied to this model before; build it again")
    placed = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if placed:
        raise ValueError(f"the model already has DTensors ({placed[0]} and {len(placed) - 1} more): it is sharded")


def apply_program(
    model: nn.Module,
    mesh: PlanMesh,
    program: Program,
    *,
    src_data_rank: int | None,
    autocast: torch.dtype | None = None,
    seed: int | None = None,
    diagnostics: tuple[Diagnostic, ...] = (),
    proof: str = "not proven",
    derived: DerivedPlan | None = None,
    ranks: Ranks = ALONE,
    place: tuple[int, ...] = (),
    bare: bool = False,
    kind: Kind = "program",
    compare: bool = True,
) -> nn.Module:
    """Run the phases. Returns the model, or the wrapper that its data-parallel backend puts around it.

    Args:
        autocast: the dtype in which the forward runs under torch.autocast.
        seed: the seed of the random numbers that the modules draw in training, the same on all ranks; None: they are not
            managed, as for a model whose dropout is 0.
        proof: in words, how the program is known to be right.
        derived: the plan, if `auto` derived it.
        ranks: the ranks that apply it together; each learns if another fails.
        place: the model's place among others with the same seed, which draw other numbers.
        kind: what it is applied to, for the guards.
        compare: as for `guard`.
        bare: accept a program without data parallelism on a mesh with data-parallel ranks: the model is inspected, not trained.

    Raises:
        PlanError: SP525: hooks on parameters that are replaced; the model is untouched.
        ValueError: parameters that are not contiguous; experts over ep whose gradients would not be averaged; fused logits with a
            backend that does not support them. The model is untouched.
        RuntimeError: a step failed, here or on another rank; the message names it and the module. The model is then marked
            unusable, and its forward raises.
    """
    draws = draws_of(program)
    streams = streams_of(mesh, seed, place) if seed is not None and draws else None
    work = Work(
        model,
        unwrapped(model),
        mesh,
        program,
        src_data_rank,
        ranks,
        autocast=autocast,
        draws=draws,
        streams=streams,
        bare=bare,
    )
    with ranks.step():
        check_experts(mesh, program)
        if _replaces(work) and (found := tuple(hooked(program.resolved))):
            raise PlanError(found)
        section = program.resolved.data_parallel
        backend = None if section is None else BACKENDS[section.backend]
        if backend is not None and backend.shards and mesh.data_parallel(backend) is not None:
            refuse_scattered(model)
        if backend is not None and program.fused_heads and not backend.reads_later:
            raise ValueError(
                f'fused logits: {backend.name} may free the head\'s parameters before the loss reads them: pass logits="sharded", or '
                'data_parallel={"backend": "fsdp2"}'
            )
    apart = drawn_apart(model, mesh, src_data_rank) if kind == "model" and compare else ()
    before = names_of(model)
    name = ""
    try:
        for name, phase in PHASES:
            mark_unusable(model, name)
            try:
                with ranks.step():
                    acted = phase(work)
                    if acted or name == PHASES[-1][0]:
                        check_unchanged(before, model, name)
            except Exception as error:
                module = None if isinstance(error, OtherRankFailed) else module_of(error)
                where = f" at {module}" if module else ""
                raise RuntimeError(
                    f"applying plan {program.resolved.plan.name!r} failed in the step {name!r}{where}: {error}"
                ) from error
            if acted:
                work.steps.append(name)
        result = work.result if work.result is not None else model
        split, regime = work.moves or work.result is not None, None if work.shared is None else work.shared.regime
        guard(Watched(result, work.inner, mesh, split, work.parts, program, regime, apart), kind, compare=compare)
        order_hooks(result)
        steps = tuple(work.steps)
        record = Applied(program, diagnostics, steps, result, work.shared, mesh, work.fused, proof, streams, derived)
        remember(record, model)
    except BaseException:  # also an interruption, at any point
        mark_unusable(model, name)
        refuse_forwards(model, name)
        raise
    return result
