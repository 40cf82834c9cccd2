"""The proof on all ranks of the tp axis in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardplan.compiler.lower.program import Program
from shardplan.core.report import Comparison
from shardplan.model.rebinding import copied
from shardplan.runtime.apply.plan_mesh import read_mesh
from shardplan.torchlib.modes import NothingEmpty
from shardplan.torchlib.private import private

from .compare import worst_of
from .exact import in_precision_of
from .rank import rank_rows
from .steps import Batch, Steps
from .threads import OnRanks


def simulate(
    build: Callable[[], nn.Module], batches: Sequence[Batch], program: Program, reference: Steps, on_ranks: OnRanks
) -> tuple[Comparison, ...]:
    """Apply a program on every rank, run the steps, and compare them with the unsharded ones; each row is the worst over the
    ranks.

    Args:
        build: makes the model on the CPU, with the weights of the reference.
        on_ranks: of as many ranks as tp has.
    """
    tp = program.resolved.sizes.tp
    assert tp is not None  # a proof is of one size
    # What other ranks are sent is a matter of the exchange alone: the ranks of tp stand for all.
    ep = tp if "expert_parallel" in program.resolved.overlays else 1
    first = build()
    models = [first, *(_sharing(copied(first), first) for _ in range(tp - 1))]

    def rows(rank: int) -> tuple[Comparison, ...]:
        mesh = read_mesh(init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), ep=ep)
        with NothingEmpty():
            return rank_rows(models[rank], mesh, program, [_copied(batch) for batch in batches], reference)

    with in_precision_of(first):  # the default dtype is no thread's own
        found = on_ranks(rows)
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in chain.from_iterable(found):
        errors[row.kind, row.name].append(row.error)
    alike = {key for key, seen in errors.items() if len(seen) == tp and len(set(seen)) == 1}
    return worst_of(
        replace(row, where="all ranks" if (row.kind, row.name) in alike else f"rank {rank}")
        for rank, mine in enumerate(found)
        for row in mine
    )


def _sharing(model: nn.Module, first: nn.Module) -> nn.Module:
    """The model with the memory of another's trained parameters, which no forward changes. Applying leaves each rank its part."""
    for mine, other in zip(model.parameters(), first.parameters(), strict=True):
        if mine.requires_grad:
            mine.data = other.data
    return model


def _copied(batch: Batch) -> Batch:
    """A rank's own, which its forward may change."""
    return private("tree_map")(lambda x: x.clone() if isinstance(x, Tensor) else x, dict(batch))
