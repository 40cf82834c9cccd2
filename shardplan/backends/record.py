"""What there is to say about a data-parallel backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Refusal = Literal["fully_shard", "unit_classes", "megatron_strategies"]


@dataclass(frozen=True, slots=True)
class Backend:
    """A data-parallel backend.

    Args:
        name: its word in a plan.
        fields: the fields of `DataParallel` that it carries out.
        idle: fields that mean nothing to it, and change no number if they are skipped: how and when FSDP2 gathers.
        splits: the mesh axes that it works with, above size 1; any other axis above size 1 is refused.
        hybrid: whether it works over a mesh of two dims, dp_replicate beside dp_shard x cp as one, of which the second must be
            there (of size 1 at least); else over one dim, all data-parallel axes of `splits` as one.
        joint_group: whether it wants a process group over both dims of a hybrid mesh too.
        wraps: whether it puts a wrapper around the model, with which names begin with `module.`.
        wraps_optimizer: whether its optimizer must be made to work with the wrapper.
        parts: whether modules can be units beside those that the plan names: frozen ones, those of another dtype.
        refusals: the checks that are about this backend alone.
        estimated: whether `estimate` knows what it costs.
        device: the type of device that it needs; None is any.
        module, package: what must be installed, as Python and as pip call it; empty where it is torch's own.
        sequence_parallel: whether it can be combined with sequence parallelism.
        partial_gradients: whether parameters may be summed over tp where they are read. Not where the backend reads
            them as plain tensors.
    """

    name: str
    fields: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    splits: frozenset[str] = frozenset()
    hybrid: bool = False
    joint_group: bool = False
    wraps: bool = False
    wraps_optimizer: bool = False
    parts: bool = False
    refusals: frozenset[Refusal] = frozenset()
    estimated: bool = False
    device: str | None = None
    module: str = ""
    package: str = ""
    sequence_parallel: bool = True
    partial_gradients: bool = True

    @property
    def shards(self) -> bool:
        """Whether a rank keeps a part of the model only."""
        return "dp_shard" in self.splits
