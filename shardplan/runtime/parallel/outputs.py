"""Changes of a module's output other than a single move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.core.layout import I, P, R, V

from .regime import LeftBehind
from .tensor_moves import move


def on_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to the output, or else to the first tensor in it (tuples, lists, mappings and dataclasses, in
    order). The layout check takes the same tensor for the module's result.

    Raises:
        ValueError: the output has no tensor.
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
    """Whether the value has a tensor, and the value with the first tensor changed."""
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
                object.__setattr__(value, field.name, new)  # also in frozen dataclasses
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
    """The fields of a transformers ModelOutput with hidden states (`hidden_states`, `encoder_hidden_states`): tensors or tuples of
    them; empty where the output has none."""
    fields = output.items() if isinstance(output, Mapping) else ()
    return {
        name: states
        for name, states in fields
        if isinstance(name, str) and name.endswith("hidden_states") and isinstance(states, tuple)
    }


def in_tuples(output: Any, change: Callable[[Any], Any], read: frozenset[int] = frozenset()) -> Any:
    """Change every value in the inner tuples of an output that is a plain tuple: hidden states are there, without a name.

    Args:
        read: positions that are left alone.
    """
    if type(output) is not tuple or not any(isinstance(one, tuple) for one in output):
        return output
    return tuple(
        _each(one, change) if isinstance(one, tuple) and i not in read else one for i, one in enumerate(output)
    )


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change each value in nested tuples (BridgeTower's hidden states are tuples, one for each tower)."""
    return tuple(_each(one, change) for one in value) if isinstance(value, tuple) else change(value)


class HiddenStates:
    """Makes hidden states equal to the unsharded model's: the sequence shards of the inner layers are gathered. Their gradients are
    already complete.

    Args:
        left: what the forward recorded about them.
        seq_dim: the sequence dimension.
        mesh: the one-dimensional tp mesh.
        over_cp: the length of the whole sequence, if the recorded lengths are those of this rank's slice over cp.
    """

    def __init__(self, left: LeftBehind, seq_dim: int, mesh: DeviceMesh, over_cp: int | None = None):
        self.left, self.seq_dim, self.mesh, self.over_cp = left, seq_dim, mesh, over_cp

    def of_model(self, output: Any) -> Any:
        """Fix the output of a model: a transformers ModelOutput, which is changed in place, as those in it are (CLIP's of each tower), or a
        tuple. Outputs without hidden states, and unknown tensors, are left alone."""
        if self.left.states or self.left.lengths:
            for name, states in hidden_states_of(output).items():
                output[name] = _each(states, self._named)
            for part in output.values() if isinstance(output, Mapping) else ():
                if isinstance(part, Mapping):
                    self.of_model(part)
        return in_tuples(output, self._known) if self.left.states else output

    def of_part(self, output: Any, shape: torch.Size, read: frozenset[int]) -> Any:
        """Fix the output of the module around the blocks, if it is a plain tuple: code around it may slice it.

        Args:
            shape: the shape of the blocks' input with the whole sequence. Hidden states have this shape, or a slice's; those before the
                blocks have the sequence length of the slice over cp.
            read: positions that the model's own code was seen to read; it expects slices.
        """
        length = shape[self.seq_dim]
        lengths = {length, length // self.mesh.size(), self.over_cp or length}
        likes = [[*shape[: self.seq_dim], one, *shape[self.seq_dim + 1 :]] for one in lengths]

        def whole(state: Any) -> Any:
            like = isinstance(state, Tensor) and list(state.shape) in likes
            return self._whole(state, {length}) if like else state

        return in_tuples(output, whole, read)

    def _named(self, state: Any) -> Any:
        if state is None or self.left.is_sum(state):
            return state if state is None else self._whole(state, ())
        if any(one is state for one, _ in self.left.states) or state.ndim <= self.seq_dim:
            return self._known(state)
        part = state.shape[self.seq_dim]
        known = self.left.lengths.intersection((part, part * self.mesh.size()))
        return self._whole(state, self.left.lengths) if known else state

    def _known(self, state: Any) -> Any:
        lengths = next((lengths for one, lengths in self.left.states if one is state), None)
        return state if lengths is None else self._whole(state, lengths)

    def _whole(self, state: Tensor, lengths: Collection[int]) -> Tensor:
        """
        Args:
            lengths: those that the whole sequence may have.

        Raises:
            RuntimeError: the state may be whole, and a slice of a longer sequence; as `LeftBehind.is_partial`.
        """
        if self.left.is_sum(state):  # the embeddings' output, if a hook saw it before the first block
            return move(state, self.mesh, P, I)
        part = state.shape[self.seq_dim]
        if part * self.mesh.size() not in lengths:  # the last one, gathered by the final norm, or made of that
            return move(state, self.mesh, R, I) if self.left.is_partial(state) else state
        if part in (*lengths, self.over_cp):
            raise RuntimeError(
                f"hidden states of length {part} may be whole, or slices of {part * self.mesh.size()}: the model runs over "
                f"sequences of both lengths (call it without output_hidden_states, or with other lengths)"
            )
        return move(state, self.mesh, V(self.seq_dim), I)


def whole_over_cp(output: Any, length: int, dim: int, mesh: DeviceMesh) -> Any:
    """Return a model's output with hidden states whole over cp.

    Args:
        output: a transformers ModelOutput, which is changed in place, or a tuple. Outputs without hidden states are left alone.
        length: the length of the whole sequence.
        dim: its dim, in hidden states too.
        mesh: the one-dimensional cp mesh.
    """

    def whole(state: Any) -> Any:
        if state is None or state.ndim <= dim or state.shape[dim] * mesh.size() != length:
            return state
        return move(state, mesh, V(dim), R)

    for name, states in hidden_states_of(output).items():
        output[name] = _each(states, whole)
    # Keys of a cache, [batch, heads, sequence, features], have one more dim.
    return in_tuples(output, lambda one: whole(one) if isinstance(one, Tensor) and one.ndim == dim + 2 else one)
