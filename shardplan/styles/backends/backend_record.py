"""The record of a data-parallel backend."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core.mesh import Axis


@dataclass(frozen=True, slots=True)
class Backend:
    """A data-parallel backend.

    Args:
        name: its name in a plan.
        summary: what it is, in a few words, for the schema.
        fields: the fields of `DataParallel` that it supports.
        idle: fields that mean nothing to it, and change no number if they are skipped: how and when FSDP2 gathers.
        splits: the mesh axes that may be larger than 1; any other axis above size 1 is refused.
        hybrid: whether it works over a mesh of two dims, dp_replicate beside dp_shard x cp as one, of which the second must be
            there (of size 1 at least); else over one dim, all data-parallel axes of `splits` as one.
        joint_group: whether it needs a process group over both dims of a hybrid mesh too.
        wraps: whether it puts a wrapper around the model, with which names begin with `module.`.
        parts: whether modules can be units beside those that the plan names: frozen ones, those of another dtype.
        experts: whether experts that are distributed over ep can be units over a mesh of their own.
        fully_shard: whether its units are those of torch's `fully_shard`, which refuses some models.
        units_by_class: whether it finds its units by their class, so that all modules of the class are units.
        traceable: whether a step with it runs on tensors without memory, so that its cost can be traced.
        device: the type of device that it needs; None is any.
        module, package: what must be installed, as Python and as pip call it; empty where it is torch's own.
        sequence_parallel: whether it can be combined with sequence parallelism.
        stages: whether it can wrap the stages of a pipeline.
        partial_gradients: whether parameters may be summed over tp where they are read. Not where the backend reads
            them as plain tensors.
        portable_states: whether training states (`save_training_state`) were seen to be read with other backends, and theirs
            with it.
        reads_later: whether parameters that a loss reads behind their module's forward are there.
    """

    name: str
    summary: str
    fields: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    splits: frozenset[Axis] = frozenset()
    hybrid: bool = False
    joint_group: bool = False
    wraps: bool = False
    parts: bool = False
    experts: bool = False
    fully_shard: bool = False
    units_by_class: bool = False
    traceable: bool = False
    device: str | None = None
    module: str = ""
    package: str = ""
    sequence_parallel: bool = True
    stages: bool = True
    partial_gradients: bool = True
    portable_states: bool = True
    reads_later: bool = True

    @property
    def shards(self) -> bool:
        """Whether a rank stores only a part of the model."""
        return Axis.DP_SHARD in self.splits
