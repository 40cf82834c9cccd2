"""What happens to a module's output besides one move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.core.layout import I, R, V

from .moves import move


def on_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to the output, or to its first element if it is a tuple."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)


def move_tail(x: Tensor, tail: int, mesh: DeviceMesh) -> Tensor:
    """Move the last `tail` features I -> R: every rank's heads read them, so their gradient is a partial sum."""
    head, rest = x.split([x.shape[-1] - tail, tail], dim=-1)
    return torch.cat([head, move(rest, mesh, I, R)], dim=-1)


def as_dtensor(x: Tensor, size: int, mesh: DeviceMesh) -> DTensor:
    """This rank's slice of the last dim as a DTensor of the full shape (`size` need not divide evenly)."""
    shape = torch.Size((*x.shape[:-1], size))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


def gather_hidden_states(output: Any, length: int, seq_dim: int, mesh: DeviceMesh) -> None:
    """Make a model output's `hidden_states` what the unsharded model returns: gather the sequence shards of the inner
    layers. Their gradients arrive complete.

    Args:
        output: a transformers ModelOutput; changed in place. What has no `hidden_states` is left alone.
        length: the length of a whole sequence.
    """
    states = getattr(output, "hidden_states", None)
    if not isinstance(states, tuple):
        return

    def whole(state: Tensor | None) -> Tensor | None:
        if state is None:
            return None
        if state.shape[seq_dim] == length:  # the last one, gathered by the final norm for the head
            return move(state, mesh, R, I)
        return move(state, mesh, V(seq_dim), I)

    output["hidden_states"] = tuple(whole(state) for state in states)
