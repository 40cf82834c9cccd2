"""Steps of a plan with which each cp rank returns its own tokens' results, as a training loop makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.core.layout import P, R, V
from shardplan.core.mesh import Axis
from shardplan.model.labels_over_cp import SEQUENCE
from shardplan.model.reduced.outcome import results_of
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.parallel.tensor_moves import move
from shardplan.runtime.training.context_parallel import context_parallel

from .steps import Steps, made


class OwnTokens:
    """Calls the model inside `context_parallel`, and makes its outputs whole: the loss is the mean of the ranks' losses.

    Args:
        mesh: one with a cp axis.
        reference: the unsharded steps.
    """

    def __init__(self, mesh: PlanMesh, reference: Steps):
        assert mesh.cp is not None
        self.mesh, self.reference = mesh.cp, reference

    def __call__(self, model: nn.Module, batch: dict[str, Any], step: int) -> Mapping[str, Tensor]:
        with context_parallel(model, **batch) as inputs:
            results = made(results_of(model(**inputs)))
        expected = self.reference.outputs[step]
        return {
            name: self._whole(value, expected[name]) if name in expected else value for name, value in results.items()
        }

    def _whole(self, value: Tensor, expected: Tensor) -> Tensor:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        ranks, shape = self.mesh.size(), list(expected.shape)
        if not shape:
            return move(value / ranks, self.mesh, P.on(Axis.CP), R.on(Axis.CP))
        if value.ndim == len(shape) > SEQUENCE and value.shape[SEQUENCE] * ranks == shape[SEQUENCE]:
            return move(value, self.mesh, V(SEQUENCE).on(Axis.CP), R.on(Axis.CP))
        return value
