"""What happens to a module's output besides one move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.core.layout import I, P, R, V

from .regime import LeftBehind, reached_as_partial_sum
from .tensor_moves import move

SEQUENCE = 1  # the dim of hidden states [batch, sequence, hidden]


def on_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to the output; where it is no tensor, to the first tensor in it (tuples, lists, mappings and
    dataclasses, in order), which the layout check treats as the module's result.

    Raises:
        ValueError: there is no tensor in it.
    """
    if isinstance(output, Tensor):
        return change(output)
    if type(output) is tuple and output and isinstance(output[0], Tensor):  # nearly always
        return (change(output[0]), *output[1:])
    found, changed = _on_first(output, change)
    if not found:
        raise ValueError(f"a module returned {type(output).__name__} without a tensor, but its rule moves its result")
    return changed


def _on_first(value: Any, change: Callable[[Tensor], Tensor]) -> tuple[bool, Any]:
    """Whether there is a tensor in it, and the value with the first one changed."""
    if isinstance(value, Tensor):
        return True, change(value)
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            found, new = _on_first(item, change)
            if found:
                items = [*value[:i], new, *value[i + 1 :]]
                return True, type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found, new = _on_first(item, change)
            if found:
                value = copy.copy(value)
                value[key] = new
                return True, value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            found, new = _on_first(getattr(value, field.name, None), change)
            if found:
                value = copy.copy(value)
                object.__setattr__(value, field.name, new)  # of a frozen one too
                return True, value
    return False, value


def move_tail(x: Tensor, tail: int, mesh: DeviceMesh) -> Tensor:
    """Move the last `tail` features I -> R: every rank's heads read them, so their gradient is a partial sum."""
    head, rest = x.split([x.shape[-1] - tail, tail], dim=-1)
    return torch.cat([head, move(rest, mesh, I, R)], dim=-1)


def as_dtensor(x: Tensor, size: int, mesh: DeviceMesh) -> DTensor:
    """This rank's slice of the last dim as a DTensor of the full shape (`size` need not divide evenly)."""
    shape = torch.Size((*x.shape[:-1], size))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


def hidden_states_of(output: Any) -> dict[str, tuple[Any, ...]]:
    """The fields of a transformers ModelOutput that have hidden states (`hidden_states`, `encoder_hidden_states`), tensors or tuples of
    them; none where the output has none."""
    fields = output.items() if isinstance(output, Mapping) else ()
    return {
        name: states
        for name, states in fields
        if isinstance(name, str) and name.endswith("hidden_states") and isinstance(states, tuple)
    }


def gather_hidden_states(
    output: Any, left: LeftBehind, seq_dim: int, mesh: DeviceMesh, over_cp: int | None = None
) -> None:
    """Make the hidden states in a model's output what the unsharded model returns: gather the sequence shards of the inner
    layers. Their gradients are already complete.

    Args:
        output: a transformers ModelOutput; changed in place. What has no hidden states is left alone.
        left: what is known of them. Others are left alone.
        over_cp: the length of the whole sequence, where the lengths that are known are those of this rank's slice over cp.
    """

    def whole(state: Any) -> Any:
        if isinstance(state, tuple):  # BridgeTower's: of each of its towers
            return tuple(map(whole, state))
        if state is None:
            return state
        if reached_as_partial_sum(state):  # the embeddings, where a hook saw them before the first block
            return move(state, mesh, P, I)
        length = next((length for one, length in left.states if one is state), None)
        if length is None and state.ndim > seq_dim:
            part = state.shape[seq_dim]
            length = (
                part if part in left.lengths else part * mesh.size() if part * mesh.size() in left.lengths else None
            )
        if length is None:
            return state
        if state.shape[seq_dim] in (length, over_cp):  # the last one, gathered by the final norm for the head
            return move(state, mesh, R, I) if left.is_partial(state) else state
        return move(state, mesh, V(seq_dim), I)

    for name, states in hidden_states_of(output).items() if left.states or left.lengths else ():
        output[name] = tuple(whole(state) for state in states)


def whole_over_cp(output: Any, length: int, mesh: DeviceMesh) -> None:
    """Make the hidden states in a model's output whole over cp.

    Args:
        output: a transformers ModelOutput; changed in place. What has no hidden states is left alone.
        length: of the whole sequence.
        mesh: the one-dimensional cp mesh.
    """

    def whole(state: Any) -> Any:
        if isinstance(state, tuple):
            return tuple(map(whole, state))
        if state is None or state.ndim <= SEQUENCE or state.shape[SEQUENCE] * mesh.size() != length:
            return state
        return move(state, mesh, V(SEQUENCE), R)

    for name, states in hidden_states_of(output).items():
        output[name] = tuple(whole(state) for state in states)
