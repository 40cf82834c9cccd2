"""The first phase: tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from shardplan.compiler.lower.program import Program
from shardplan.runtime.parallel.make_styles import make_styles
from shardplan.runtime.parallel.regime import Shared


def shard(
    model: nn.Module, mesh: DeviceMesh, program: Program, *, src_data_rank: int | None, ready: Callable[[], None]
) -> Shared:
    """Shard the model's parameters over the one-dimensional tp mesh and register the moves.

    Args:
        ready: called before the values of a parameter are sent; raises where another rank failed.
    """
    styles, shared = make_styles(program.resolved, program.by_name, ready)
    root = styles.pop("", None)
    parallelize_module(model, mesh, styles, src_data_rank=src_data_rank)
    if root is not None:
        # As the key "" it would lose src_data_rank.
        parallelize_module(model, mesh, root, src_data_rank=src_data_rank)
    return shared
