"""Modules that have all tokens and a share of the heads: the hollow argument, and parameters and buffers read by share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.layout import R, V
from shardplan.core.module_program import ContextProgram, HeadShare
from shardplan.core.moves import Ranges
from shardplan.model.labels_over_cp import SEQUENCE
from shardplan.torchlib.attributes import owner_of
from shardplan.torchlib.hollow import Hollow

from .dim_exchange import pieces_of
from .reading import Place, call_with, read
from .regime import Regime
from .tensor_moves import move


def shares_of(program: ContextProgram, over_tp: DeviceMesh) -> tuple[Ranges, ...] | None:
    """Each cp rank's features, among those of this tp rank."""
    return None if program.features is None else program.features.of_ranks(over_tp.get_local_rank())


def hollow_of(x: Tensor, module: str, regime: Regime) -> Tensor:
    """The stand-in for a rank's tokens that a module with exchanged heads gets."""
    shape = list(x.shape)
    shape[SEQUENCE] = regime.length = shape[SEQUENCE] * regime.over_cp.size()

    def refused(function: str) -> str:
        return (
            f"the code of {module} computes with its argument ({function}) before a projection reads it, but a cp rank has only its "
            "own tokens of it: write `replicate_seq` in place of `exchange_heads` for this module"
        )

    def slice_of(whole: Tensor) -> Tensor:
        return move(whole, regime.over_cp, R, V(SEQUENCE))

    return Hollow(x, torch.Size(shape), slice_of, refused)


def taken(x: Tensor, module: str, regime: Regime) -> Tensor:
    """The input of a projection in the module: this rank's tokens if it is the hollow argument, or else a value with all tokens.

    Raises:
        RuntimeError: it is neither.
    """
    if isinstance(x, Hollow):
        regime.length = x.shape[SEQUENCE]  # a checkpoint runs the module again after calls with other lengths
        return x.kept
    if not has_all_tokens(x, regime):
        raise RuntimeError(
            f"{module} reads a value of shape {list(x.shape)}, which is not the argument of the module around it and does not have "
            f"all {regime.length} tokens: write `replicate_seq` in place of `exchange_heads` for that module"
        )
    return x


def has_all_tokens(x: Tensor, regime: Regime) -> bool:
    """Whether a projection's input, [..., tokens, features], has all of them."""
    return x.ndim > 1 and x.shape[-2] == regime.length


class HeadShares:
    """Wraps a forward: it reads this rank's share of parameters and buffers, of its module and those below.

    Args:
        programs: by variant.
        regime: its variant is used.
        over_tp: the tp mesh.
    """

    def __init__(self, programs: Mapping[str, ContextProgram | None], regime: Regime, over_tp: DeviceMesh):
        self.programs, self.regime, self.over_tp = programs, regime, over_tp

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        program = self.programs[self.regime.variant]
        if program is None or (program.takes and not has_all_tokens(_first(args, kwargs), self.regime)):
            return forward(*args, **kwargs)
        places = [_place(module, one) for one in program.shares]
        own = [self._own(one, whole) for one, (*_, whole) in zip(program.shares, places, strict=True)]
        return call_with(forward, places, own, args, kwargs)

    def _own(self, one: HeadShare, whole: Tensor | None) -> Tensor | None:
        if whole is None:
            return None
        if one.over_tp is not None:
            whole = read(whole, one.over_tp, self.regime)
        ranges = one.of_ranks(self.over_tp.get_local_rank())[self.regime.over_cp.get_local_rank()]
        return pieces_of(whole, one.dim, ranges)


def _place(module: nn.Module, one: HeadShare) -> Place:
    owner, leaf = owner_of(module.get_submodule(one.owner), one.over_both.name)
    slots: dict[str, Any] = owner._buffers if one.buffer else owner._parameters
    return slots, leaf, slots[leaf]


def _first(args: tuple, kwargs: dict) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))
