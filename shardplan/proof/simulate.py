"""The proof on all ranks of a mesh in one process: the code that trains on processes runs on threads, with FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardplan.compiler.lower.program import Program
from shardplan.core.by_key import by_key
from shardplan.core.mesh import Axis
from shardplan.core.report import Comparison
from shardplan.core.sections import DataParallel
from shardplan.model.rebinding import copied
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.modes import meshes_made_once
from shardplan.torchlib.packing import unpack

from .compare import compare_steps, worst_of
from .exact import in_precision_of
from .rank import VIEWS, Left, data_parallel_rank, mesh_of, rank_steps
from .steps import Batch, Steps
from .threads import OnRanks


class Run(NamedTuple):
    """The unsharded side of a comparison.

    Args:
        build: makes the model on the CPU, with the weights of the reference.
        batches: data-parallel rank -> its batches.
        references: data-parallel rank -> the steps on its batches, with the gradients of all ranks (`steps.averaged`).
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Sequence[Batch]]
    references: Sequence[Steps]


def simulate(run: Run, program: Program, on_ranks: OnRanks) -> tuple[Comparison, ...]:
    """Apply a program on every rank, run the steps, and compare them with the unsharded ones; each row is the worst
    over the ranks.

    Args:
        program: for the simulated mesh, in the dtypes of the model (`compile_for`).
        on_ranks: calls a function on each rank of the mesh.
    """
    rows: list[Comparison] = []
    found = results_on_ranks(run, program, on_ranks)
    for index, reference in enumerate(run.references):
        ranks = {f"rank {rank}": left for rank, (own, left) in enumerate(found) if own == index}
        rows += compare_steps(reference, ranks)
    return worst_of(rows)


def results_on_ranks(
    run: Run,
    program: Program,
    on_ranks: OnRanks,
    applied: Callable[[int, nn.Module], None] = lambda rank, model: None,
    autocast: torch.dtype | None = None,
) -> list[tuple[int, Left]]:
    """Apply a program on every rank, and run the steps. Of each rank: its data-parallel rank, and its results, whole.

    Args:
        applied: called with each rank, and its planned model.
        autocast: as for `apply_program`.
    """
    sizes, program = program.resolved.sizes, with_data_parallel(program)
    first, written = run.build(), frozenset().union(*(reference.written for reference in run.references))
    models = [first, *(copy_of(first, written) for _ in range(sizes.world_size - 1))]
    section = program.resolved.data_parallel
    # FSDP2 casts, also where it has one rank
    casts = section is not None and section.mixed_precision is not None
    axes = [axis for axis in Axis if sizes.of(axis) > 1 or (casts and axis is Axis.DP_SHARD)]

    def steps(rank: int) -> tuple[int, Left]:
        mesh = mesh_of(sizes, axes)
        index = data_parallel_rank(mesh)
        batches, reference = run.batches[index], run.references[index]
        on_rank = partial(applied, rank)
        return index, rank_steps(models[rank], mesh, program, batches, reference, _parts, on_rank, autocast)

    with common_to_ranks(first):
        found = on_ranks(steps)
    packed, tp = packed_parameters(program), sizes.of(Axis.TP)
    gradients, parameters = (
        _joined([getattr(left, kind) for _, left in found], packed, tp) for kind in ("gradients", "parameters")
    )
    return [
        (own, replace(left, gradients=gradients[rank], parameters=parameters[rank]))
        for rank, (own, left) in enumerate(found)
    ]


@contextmanager
def common_to_ranks(model: nn.Module) -> Iterator[None]:
    """Settings for all ranks while they run: the default dtype, warning filters and torch's functions are not a thread's own.

    Args:
        model: in the dtype in which it runs.
    """
    with in_precision_of(model), warnings.catch_warnings(), meshes_made_once():
        warnings.filterwarnings("ignore", VIEWS)
        yield


def with_data_parallel(program: Program) -> Program:
    """The program with data parallelism, which averages the gradients of data-parallel ranks even if the plan has no section."""
    resolved = program.resolved
    return replace(program, resolved=replace(resolved, data_parallel=resolved.data_parallel or DataParallel()))


def _parts(value: DTensor) -> bool:
    """Whether the ranks hold parts of one tensor, which not every rank needs to make whole."""
    return not any(placement.is_partial() for placement in value.placements)


def _joined(ranks: Sequence[Mapping[str, Tensor]], packed: Mapping[str, Packing], tp: int) -> list[dict[str, Tensor]]:
    """Make each rank's tensors whole; ranks with parts of the same tensor share the result."""
    whole: list[dict[str, Tensor]] = [{} for _ in ranks]
    others = cache(_others)
    for name in dict.fromkeys(name for mine in ranks for name in mine):
        every = [mine.get(name) for mine in ranks]
        made: dict[tuple[int, ...], Tensor] = {}
        for rank, value in enumerate(every):
            if value is None:
                continue
            if isinstance(value, DTensor):
                places = others(value.device_mesh, value.placements, rank)
                group = tuple(places)
                if group not in made:
                    made[group] = _put_together(value, places, every, packed.get(name), tp)
                value = made[group]
            whole[rank][name] = value
    return whole


def _others(mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> Mapping[int, tuple[int, ...]]:
    """The ranks that have the parts of a rank's tensor, with their coordinates in its mesh."""
    ranks = mesh.mesh
    (mine,) = (ranks == rank).nonzero().tolist()
    places = ((int(ranks[tuple(place)]), tuple(place)) for place in _coordinates(ranks.shape))
    whole = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    return {other: place for other, place in places if all(place[axis] == mine[axis] for axis in whole)}


def _coordinates(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for place in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        yield tuple(place)


def _put_together(
    value: DTensor,
    places: Mapping[int, tuple[int, ...]],
    ranks: Sequence[Tensor | None],
    packed: Packing | None,
    tp: int,
) -> Tensor:
    """Join the parts of a tensor. A part that some rank lacks is left out; the result then has another shape.

    An axis that cuts another axis's part (FSDP2's, after tp's cut) comes before the other in the mesh: its placement has a split
    factor, and it is undone first.
    """
    parts = {place: x.to_local() for rank, place in places.items() if isinstance(x := ranks[rank], DTensor)}
    cuts: list[tuple[int, Any]] = [
        (axis, placement) for axis, placement in enumerate(value.placements) if not placement.is_replicate()
    ]
    cuts.sort(key=lambda cut: (not hasattr(cut[1], "split_factor"), -cut[0]))
    for axis, placement in cuts:
        rows = by_key(((*place[:axis], 0, *place[axis + 1 :]), parts[place]) for place in sorted(parts))
        parts = {place: torch.cat(row, placement.dim) if len(row) > 1 else row[0] for place, row in rows.items()}
    (whole,) = parts.values()
    if packed is None or tp == 1 or whole.shape != value.shape:
        return whole
    return unpack(whole, packed.dim, packed.parts, tp)


def copy_of(model: nn.Module, written: Collection[str]) -> nn.Module:
    """A copy that shares the memory of trained parameters, except those that a forward changes. Applying a plan gives each rank its own part."""
    own = {
        id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in written or not p.requires_grad
    }
    return copied(model, {id(p): type(p)(p.data, requires_grad=True) for p in model.parameters() if id(p) not in own})
