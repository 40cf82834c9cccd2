"""The data-parallel backends, one record each. This is data; `shardplan.runtime.apply` has the function of each."""

from shardplan.core.mesh import APPLIED, Axis

from .backend_record import Backend

FSDP2 = Backend(
    name="fsdp2",
    summary="torch's fully_shard",
    fields=frozenset(
        {"units", "reshard_after_forward", "mixed_precision", "cpu_offload", "prefetch", "frozen", "ignored"}
    ),
    splits=frozenset(APPLIED),
    hybrid=True,
    parts=True,
    experts=True,
    fully_shard=True,
    traceable=True,
)

MEGATRON_FSDP = Backend(
    name="megatron_fsdp",
    summary="the megatron-fsdp package",
    fields=frozenset({"units", "megatron_fsdp"}),
    idle=frozenset({"reshard_after_forward", "prefetch"}),
    splits=frozenset(APPLIED),
    hybrid=True,
    joint_group=True,
    wraps=True,
    units_by_class=True,
    device="cuda",
    module="megatron_fsdp",
    package="megatron-fsdp",
    sequence_parallel=False,
    stages=False,
    partial_gradients=False,
    portable_states=False,
    reads_later=False,
)

DDP = Backend(
    name="ddp",
    summary="torch's DistributedDataParallel, every rank a whole copy",
    fields=frozenset({"ddp"}),
    idle=frozenset({"units", "reshard_after_forward", "prefetch"}),
    splits=frozenset({Axis.DP_REPLICATE}),
    wraps=True,
)

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (FSDP2, MEGATRON_FSDP, DDP)}

__all__ = ["BACKENDS", "Backend"]
