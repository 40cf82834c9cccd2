"""The state of whole-matrix steps: each matrix's owner has it; a saved training state, which knows no owners, has it as shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from shardplan.torchlib.gathering import full_tensor, of_all

from .matrix_shards import Stack
from .owned_matrices import Owned

PREFIX = "whole_matrix."  # the prefix of its tensors' names in their parameter's state
LEADING = 3  # dims of size 1 before a state's own: a state tensor with its parameter's shape would be taken for rows in stored order
State = dict[str, Tensor]
_Kind = tuple[int, str, torch.Size, torch.dtype]  # the part, the name, the tensor of each matrix


class MatrixStates:
    """Dicts of tensors at the owner, one for each matrix and each of its parts.

    The optimizer's state_dict has one tensor for all matrices of a stack, [matrices, 1, 1, 1, ...], sharded over the parameter's
    ranks: any mesh reads it. state_dict and load_state_dict are collectives of these ranks.
    """

    def __init__(self, optimizer: Optimizer, stacks: Sequence[Stack], pieces: Sequence[Owned]) -> None:
        self._of: dict[tuple[Stack, int, int], State] = defaultdict(dict)
        self._stacks = stacks
        self._pieces: dict[Stack, list[Owned]] = defaultdict(list)
        for piece in pieces:
            self._pieces[piece.stack].append(piece)
        optimizer.register_state_dict_post_hook(self._saved)
        optimizer.register_load_state_dict_pre_hook(self._loaded)

    def of(self, stack: Stack, matrix: int, part: int) -> State:
        """The state of a part of a matrix of a stack; empty at first. Ask for it at the owner only."""
        return self._of[stack, matrix, part]

    def _saved(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = dict(state_dict["state"])
        for key, stack in zip(state_dict["param_groups"][0]["params"], self._stacks, strict=True):
            made = {f"{PREFIX}{kind[0]}.{kind[1]}": self._whole(stack, kind) for kind in self._kinds(stack)}
            if made:
                state[key] = {**state.get(key, {}), **made}
        return {**state_dict, "state": state}

    def _kinds(self, stack: Stack) -> list[_Kind]:
        """The tensors that the owners have, in one order on all ranks."""
        own: list[_Kind] = []
        for (one, _, part), state in self._of.items():
            if one is stack:
                for name, value in state.items():
                    if not isinstance(value, Tensor):
                        raise TypeError(
                            f"whole_matrix keeps {name!r} of {stack.name}, which is {value!r}: keep tensors, torch.tensor({value!r})"
                        )
                    own.append((part, name, value.shape, value.dtype))
        found = of_all(own, stack.group) if stack.group is not None else [own]
        return sorted({kind for some in found for kind in some}, key=lambda kind: kind[:2])

    def _whole(self, stack: Stack, kind: _Kind) -> Tensor:
        part, name, shape, dtype = kind
        parameter = stack.parameter
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        whole = torch.zeros(stack.shape[0], *shape, dtype=dtype, device=device)
        for piece, values in self._rows(stack, whole):
            if piece.owner == stack.place:
                for row, matrix in enumerate(range(*piece.which)):
                    values[row].copy_(self._of[stack, matrix, part][name])
            if stack.group is not None:
                dist.broadcast(values, dist.get_global_rank(stack.group, piece.owner), group=stack.group)
        whole = whole.view(stack.shape[0], *(1,) * LEADING, *shape)
        if not isinstance(parameter, DTensor):
            return whole
        longest = max(range(whole.ndim), key=lambda dim: whole.shape[dim])
        split = [Replicate() if one.is_replicate() else Shard(longest) for one in parameter.placements]
        return distribute_tensor(whole, parameter.device_mesh, split, src_data_rank=None)

    def _rows(self, stack: Stack, whole: Tensor) -> Iterator[tuple[Owned, Tensor]]:
        return ((piece, whole[slice(*piece.which)]) for piece in self._pieces[stack])

    def _loaded(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._of.clear()
        state = dict(state_dict["state"])
        for key, stack in zip(state_dict["param_groups"][0]["params"], self._stacks, strict=True):
            entries = sorted(name for name in state.get(key, {}) if name.startswith(PREFIX))
            parts = {int(entry.removeprefix(PREFIX).split(".", 1)[0]) for entry in entries}
            if parts and len(parts) != (count := len(stack.parts) or 1):
                raise ValueError(
                    f"the state of {stack.name} was saved for {len(parts)} matrices in it, and the plan makes {count} of it: load it with "
                    "the `separate_matrices` that it was saved with"
                )
            for entry in entries:
                part, name = entry.removeprefix(PREFIX).split(".", 1)
                value = state[key][entry]
                whole = full_tensor(value) if isinstance(value, DTensor) else value
                whole = whole.reshape(whole.shape[0], *whole.shape[1 + LEADING :])
                for piece, values in self._rows(stack, whole):
                    if piece.owner == stack.place:
                        for row, matrix in enumerate(range(*piece.which)):
                            self._of[stack, matrix, int(part)][name] = values[row].clone()
            if key in state:
                state[key] = {name: value for name, value in state[key].items() if not name.startswith(PREFIX)}
        return {**state_dict, "state": state}
