"""The data-parallel backends: one record for each. Data alone; `shardplan.apply` has the function of each."""

from .record import Backend

FSDP2 = Backend(
    name="fsdp2",
    fields=frozenset(
        {"units", "reshard_after_forward", "mixed_precision", "cpu_offload", "forward_prefetch", "backward_prefetch"}
        | {"frozen", "ignored"}
    ),
    splits=frozenset({"dp_replicate", "dp_shard", "cp", "tp"}),
    hybrid=True,
    parts=True,
    refusals=frozenset({"fully_shard"}),
    estimated=True,
)

DDP = Backend(
    name="ddp",
    fields=frozenset({"ddp"}),
    idle=frozenset({"units", "reshard_after_forward", "forward_prefetch", "backward_prefetch"}),
    splits=frozenset({"dp_replicate"}),
    wraps=True,
)

MEGATRON_FSDP = Backend(
    name="megatron_fsdp",
    fields=frozenset({"units", "megatron_fsdp"}),
    idle=frozenset({"reshard_after_forward", "forward_prefetch", "backward_prefetch"}),
    splits=frozenset({"dp_replicate", "dp_shard", "cp", "tp"}),
    hybrid=True,
    joint_group=True,
    wraps=True,
    wraps_optimizer=True,
    refusals=frozenset({"unit_classes", "megatron_strategies"}),
    device="cuda",
    module="megatron_fsdp",
    package="megatron-fsdp",
    sequence_parallel=False,
    partial_gradients=False,
)

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (FSDP2, DDP, MEGATRON_FSDP)}

__all__ = ["BACKENDS", "Backend"]
