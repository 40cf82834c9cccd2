"""The record of an applied plan whose model has several parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from shardplan.compiler.lower.program import Program

from .applied import Applied
from .plan_mesh import PlanMesh


@dataclass(frozen=True)
class AppliedParts:
    """The record of an `apply_pipeline`.

    Args:
        title: the first line of its receipt.
        program: the compiled plan, of the whole model.
        mesh: what it was applied on.
        parts: what was done to each part of this rank.
    """

    title: str
    program: Program
    mesh: PlanMesh
    parts: tuple[Applied, ...]

    def __str__(self) -> str:
        """The receipt for a run's log: those of this rank's stages."""
        return "\n".join([self.title, *map(str, self.parts)])

    @property
    def tp(self) -> int:
        """The size of the tp axis."""
        return self.mesh.tp_size

    @property
    def proof(self) -> str:
        """How the plan is known to be right, in words, or why it is not proven."""
        return self.parts[0].proof

    def seed(self, seed: int) -> None:
        """As `Applied.seed`, of all parts."""
        for part in self.parts:
            part.seed(seed)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """As `Applied.check_optimizer`: the optimizer holds parameters of this rank's parts."""
        self.parts[0].check_optimizer(optimizer, self._others)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """As `Applied.wrap_optimizer`."""
        self.check_optimizer(optimizer)
        return optimizer  # the backends of pipeline stages need nothing

    def keep_checkpoints_portable(self, optimizer: Optimizer) -> None:
        """As `Applied.keep_checkpoints_portable`."""
        self.parts[0].keep_checkpoints_portable(optimizer, self.parts[1:])

    @property
    def _others(self) -> Iterable[Tensor]:
        for part in self.parts[1:]:
            part.reshard()
            yield from part.model.parameters()
