"""The ranks that apply a plan to their stages: those of one stage communicate, and all learn where one fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from shardplan.runtime.apply.failed_steps import OtherRankFailed, Ranks


class StageRanks(Ranks):
    """Within a step the ranks of a stage compare among themselves, as other stages have other parameters; at its end all do.

    Args:
        stage: the mesh of the ranks that have the same stages as this one.
        whole: the mesh of all ranks.
    """

    def __init__(self, stage: DeviceMesh, whole: DeviceMesh):
        super().__init__(stage)
        self.everyone = Ranks(whole)

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            with self.everyone.step():
                try:
                    with super().step():
                        yield
                except OtherRankFailed as error:  # in this stage: the other stages learn it here
                    raise _InThisStage(str(error)) from error
        except _InThisStage as error:
            raise OtherRankFailed(str(error)) from error


class _InThisStage(RuntimeError):
    """A rank of the same stage failed. Unlike `OtherRankFailed`, it is reported to all ranks."""
