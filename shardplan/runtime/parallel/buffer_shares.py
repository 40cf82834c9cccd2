"""Buffers that have a place for each head or feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.module_program import ParameterProgram

from .dim_exchange import pieces_of
from .regime import Regime


class OwnBuffers:
    """Wraps a module's forward: it reads this rank's share of some buffers, which are stored whole.

    Args:
        programs: variant -> how each buffer is read.
        regime: its variant is used.
        mesh: the tp mesh.
    """

    def __init__(self, programs: Mapping[str, Sequence[ParameterProgram]], regime: Regime, mesh: DeviceMesh):
        self.programs, self.regime, self.mesh = programs, regime, mesh

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        buffers = module._buffers
        whole: list[tuple[str, Tensor]] = []
        try:
            for program in self.programs[self.regime.variant]:
                buffer = buffers[program.name]
                if buffer is not None:
                    whole.append((program.name, buffer))
                    buffers[program.name] = share(buffer, program, self.mesh.size(), self.mesh.get_local_rank())
            return forward(*args, **kwargs)
        finally:
            for name, buffer in whole:
                buffers[name] = buffer


def share(whole: Tensor, program: ParameterProgram, ranks: int, rank: int) -> Tensor:
    """A rank's part of a buffer, which may have any shape with the program's dim."""
    dim = program.computed.dim
    assert isinstance(dim, int), program
    return pieces_of(whole, dim, program.ranges(whole.shape[dim], ranks, rank))
