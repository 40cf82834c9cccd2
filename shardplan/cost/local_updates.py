"""An optimizer over a rank's local part of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.torchlib.local_parts import to_local_if_dtensor

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Updates:
    """The optimizer of a traced model. DTensor runs each operator on the local tensors; this optimizer works on the local
    tensors directly, and makes the same tensors in a third of the time.

    Args:
        model: the sharded model.
        make: parameters -> their optimizer.
    """

    def __init__(self, model: nn.Module, make: MakeOptimizer) -> None:
        self._model, self._make = model, make
        self._optimizer: torch.optim.Optimizer | None = None
        self._own: dict[nn.Parameter, nn.Parameter] = {}

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        if self._optimizer is None:  # in the first forward, FSDP2 may give shards another storage
            alike = all(_as_placed(p) for p in self._model.parameters())
            self._own = {p: _local_parameter(p) if alike else p for p in self._model.parameters()}
            self._optimizer = self._make(self._own.values())
        for parameter, own in self._own.items():
            if own is not parameter and parameter.grad is not None:
                own.grad = to_local_if_dtensor(parameter.grad)
        self._optimizer.step()
        for parameter, own in self._own.items():
            if own is not parameter:
                own.grad = None

    @property
    def states(self) -> list[Tensor]:
        """This rank's part of the optimizer's states."""
        return [x for parameter in self._own for x in self.states_of(parameter)]

    def states_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """The states of one parameter."""
        if self._optimizer is None:
            return []
        states = self._optimizer.state.get(self._own[parameter], {}).values()
        return [to_local_if_dtensor(x) for x in states if isinstance(x, Tensor)]


def _as_placed(parameter: nn.Parameter) -> bool:
    """Whether a gradient has its parameter's placements; otherwise DTensor has to redistribute it first."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return True
    return isinstance(parameter, DTensor) and gradient.placements == parameter.placements


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
