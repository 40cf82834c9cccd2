"""The ranks that apply a plan to their stages: the ranks of one stage communicate; all ranks learn of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from shardplan.runtime.apply.failed_steps import OtherRankFailed, Ranks


class StageRanks(Ranks):
    """Within a step only the ranks of a stage compare, as other stages have other parameters. At its end all ranks compare.

    Args:
        stage: the mesh of the ranks that have the same stages as this one.
        whole: the mesh of all ranks.
    """

    def __init__(self, stage: DeviceMesh, whole: DeviceMesh):
        super().__init__(stage)
        self.everyone = Ranks(whole)

    @contextmanager
    def step(self) -> Iterator[None]:
        with self.everyone.step():
            try:
                with super().step():
                    yield
            except OtherRankFailed:
                self.everyone.go_on()  # the rank that failed reports it to all now
                raise
