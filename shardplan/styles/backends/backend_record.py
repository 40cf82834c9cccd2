"""The record of a data-parallel backend."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.core.mesh import Axis


@dataclass(frozen=True, slots=True)
class Backend:
    """A data-parallel backend.

    Args:
        name: its name in a plan.
        summary: a description of a few words, for the schema.
        fields: the fields of `DataParallel` that it supports.
        idle: fields without meaning for it (how and when FSDP2 gathers); skipping them changes no number.
        splits: the mesh axes that may be larger than 1; any other axis above size 1 is refused.
        hybrid: whether it works over a mesh of two dims, dp_replicate and dp_shard x cp as one; the second must
            exist, even if its size is 1. Else it works over one dim, all data-parallel axes of `splits` as one.
        joint_group: whether it also needs a process group over both dims of a hybrid mesh.
        wraps: whether it puts a wrapper around the model, so that names begin with `module.`.
        parts: whether modules that the plan does not name can be units too: frozen ones, and those of another dtype.
        experts: whether experts distributed over ep can be units over a mesh of their own.
        fully_shard: whether its units are those of torch's `fully_shard`, which refuses some models.
        units_by_class: whether it finds its units by their class, so that all modules of the class are units.
        traceable: whether its step runs on tensors without memory, so that its cost can be traced.
        device: the type of device that it needs; None is any.
        module, package: what must be installed, by its Python and its pip name; empty for torch's own.
        sequence_parallel: whether it can be combined with sequence parallelism.
        stages: whether it can wrap the stages of a pipeline.
        partial_gradients: whether parameters may be summed over tp where they are read; not if the backend reads them
            as plain tensors.
        portable_states: whether its training states (`save_training_state`) were seen to be read with other backends,
            and theirs with it.
        reads_later: whether parameters are still present when a loss reads them after their module's forward.
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
