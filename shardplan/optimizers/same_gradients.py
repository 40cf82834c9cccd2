"""Whether all ranks are about to step the same matrices: if one skips a collective, the others wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardplan.core.first_few import in_a_row
from shardplan.runtime.apply.applied import applied, was_touched

from .matrix_shards import Groups, Stack

SHOWN = 3


def ranks_of(parts: Iterable[nn.Module], stacks: Iterable[Stack], groups: Groups) -> ProcessGroup | None:
    """The group of all ranks that have a model's parameters, as shards or copies; None where no parameter is shared.

    It is for facts that the hosts know: its collectives run on the hosts, and do not wait for the devices.
    """
    meshes = [applied(part).mesh.mesh for part in parts if was_touched(part)]
    if not meshes or all(stack.group is None for stack in stacks):
        return None
    on_cpu = meshes[0].device_type == "cpu"
    return groups.of(tuple(sorted(meshes[0].mesh.flatten().tolist())), None if on_cpu else "gloo")


def check_same_gradients(stacks: Sequence[Stack], ranks: ProcessGroup) -> None:
    """A collective of `ranks`: an all-reduce of two numbers for each parameter.

    Raises:
        ValueError: on all ranks: some have a gradient of a parameter and others have none.
    """
    own = [stack.parameter.grad is not None for stack in stacks]
    of_all = torch.tensor([*own, *(not has for has in own)], dtype=torch.int32)
    dist.all_reduce(of_all, dist.ReduceOp.MIN, group=ranks)
    have, lack = of_all.view(2, -1).tolist()
    partly = [
        f"{stack.name} (this rank has {'one' if has else 'none'})"
        for stack, has, all_have, all_lack in zip(stacks, own, have, lack, strict=True)
        if not all_have and not all_lack
    ]
    if partly:
        raise ValueError(
            f"ranks step matrices together, and only some of them have a gradient of {in_a_row(partly, SHOWN)}. Nothing was changed. "
            "Where a rank's gradient is zero, write `p.grad = torch.zeros_like(p)` for it before step(); where the parameter is not to be "
            "stepped, set p.grad = None on all ranks"
        )
