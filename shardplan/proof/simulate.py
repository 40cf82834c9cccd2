"""The proof on all ranks of the tp axis in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.compiler.lower.program import Program
from shardplan.core.report import Comparison
from shardplan.model.rebinding import copied
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.modes import CheckedSizes
from shardplan.torchlib.packing import unpack
from shardplan.torchlib.private import private

from .compare import compare_steps
from .exact import in_precision_of
from .rank import Left, rank_steps
from .steps import Batch, Steps
from .threads import OnRanks


def simulate(
    build: Callable[[], nn.Module], batches: Sequence[Batch], program: Program, reference: Steps, on_ranks: OnRanks
) -> tuple[Comparison, ...]:
    """Apply a program on every rank, run the steps, and compare them with the unsharded ones; each row is the worst
    over the ranks.

    Args:
        build: makes the model on the CPU, with the weights of the reference.
        on_ranks: of as many ranks as tp has.
    """
    tp = program.resolved.sizes.tp
    assert tp is not None  # a proof is of one size
    # What other ranks are sent is a matter of the exchange alone: the ranks of tp stand for all.
    ep = tp if "expert_parallel" in program.resolved.overlays else 1
    first = build()
    models = [first, *(_copy_of(first, reference.written) for _ in range(tp - 1))]

    def steps(rank: int) -> Left:
        mesh = read_mesh(init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), ep=ep)
        with CheckedSizes():
            return rank_steps(models[rank], mesh, program, [_copied(batch) for batch in batches], reference, apart)

    def apart(gradient: DTensor) -> bool:
        return _split_dim(gradient) is not None

    with in_precision_of(first):  # the default dtype is no thread's own
        ranks = on_ranks(steps)
    packed = packed_parameters(program)

    def joined(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        made = {}
        for name, value in each[0].items():
            parts = [part for one in each if isinstance(part := one.get(name), DTensor)]
            if isinstance(value, DTensor) and len(parts) == tp:  # else some rank has none, and differs
                made[name] = _joined(parts, packed.get(name))
        return made

    gradients, parameters = joined([left.gradients for left in ranks]), joined([left.parameters for left in ranks])
    return compare_steps(
        reference,
        {
            f"rank {i}": replace(
                left, gradients={**left.gradients, **gradients}, parameters={**left.parameters, **parameters}
            )
            for i, left in enumerate(ranks)
        },
    )


def _split_dim(gradient: DTensor) -> int | None:
    """The dim of which each rank has a part: all of them make one tensor, which need not be made by each."""
    if not all(isinstance(p, Shard) or p.is_replicate() for p in gradient.placements):
        return None
    mesh = gradient.device_mesh
    cuts = [(axis, p.dim) for axis, p in enumerate(gradient.placements) if isinstance(p, Shard) and mesh.size(axis) > 1]
    return cuts[0][1] if len(cuts) == 1 and mesh.size(cuts[0][0]) == mesh.size() else None


def _joined(parts: Sequence[DTensor], packed: Packing | None) -> Tensor:
    dim = _split_dim(parts[0])
    assert dim is not None, parts[0].placements
    whole = torch.cat([part.to_local() for part in parts], dim)
    return unpack(whole, packed.dim, packed.parts, len(parts)) if packed is not None else whole


def _copy_of(model: nn.Module, written: Collection[str]) -> nn.Module:
    """A copy on the memory of the trained parameters but those that a forward changes. Applying leaves each rank its part."""
    own = {
        id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in written or not p.requires_grad
    }
    return copied(model, {id(p): type(p)(p.data, requires_grad=True) for p in model.parameters() if id(p) not in own})


def _copied(batch: Batch) -> Batch:
    """A rank's own, which its forward may change."""
    return private("tree_map")(lambda x: x.clone() if isinstance(x, Tensor) else x, dict(batch))
