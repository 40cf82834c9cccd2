"""How FSDP2 shards the experts of one ep rank."""

from __future__ import annotations

from collections.abc import Sequence


def expert_dim(shape: Sequence[int], ranks: int) -> int | None:
    """The dim along which a stack is sharded: that of experts if the ranks divide it, else the first other one that
    they divide, as FSDP2 shards other dims only evenly. None if they divide none.

    Args:
        shape: the shape of the stack on one ep rank.
        ranks: the number of ranks of the axis ep_shard.
    """
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), None)
