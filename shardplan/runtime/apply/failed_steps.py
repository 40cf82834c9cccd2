"""A step of applying a plan that fails on some rank: all ranks learn of it, and the model cannot run any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .agreement import least


class OtherRankFailed(RuntimeError):
    """Another rank failed, and reported it to this one."""


class Ranks:
    """The ranks that apply a plan. Between two steps, and before each communication within a step, they compare whether all
    continue. So no rank waits for one that failed.

    Args:
        mesh: the mesh of the ranks; None: a failure concerns no other rank, and nothing is communicated.
    """

    def __init__(self, mesh: DeviceMesh | None):
        self.mesh = mesh

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: every rank completes it, or none does.

        Raises:
            OtherRankFailed: it failed on another rank. The rank that failed raises its own error.
        """
        try:
            yield
        except OtherRankFailed:
            raise
        except Exception as error:
            try:
                self._first_failed(here=True)
            except Exception as broken:
                error.add_note(f"this could not be reported to the other ranks: {broken}")
            raise
        self.go_on()

    def go_on(self) -> None:
        """Continue, if all ranks do. A collective.

        Raises:
            OtherRankFailed: another rank failed; the message names the first one.
        """
        first = self._first_failed(here=False)
        if first is not None:
            raise OtherRankFailed(f"rank {first} failed, and its error says why")

    def _first_failed(self, *, here: bool) -> int | None:
        if self.mesh is None:
            return None
        nobody = dist.get_world_size()
        (first,) = least([dist.get_rank() if here else nobody], self.mesh)
        return None if first == nobody else first


ALONE = Ranks(None)


def refuse_forwards(model: nn.Module, step: str) -> None:
    """Make every module of the model raise RuntimeError when called: some are sharded, others are not."""

    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError(f"this model is unusable: applying a plan failed in the step {step!r}; build it again")

    for module in model.modules():
        module.register_forward_pre_hook(refuse, prepend=True)
