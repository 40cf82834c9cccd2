"""Streams of random numbers under tensor parallelism: one that all tp ranks draw alike, and one of each rank's own.

As in Megatron-LM (arXiv 1909.08053), what is whole on all ranks is dropped alike, and what is split is not. All numbers come
from torch's default generator, whose state is exchanged: so activation checkpointing, which keeps that state, draws again
what forward drew. Each new state is computed from the one before, and from nothing else that changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.module_program import Draws
from shardplan.torchlib.private import private

from .regime import Regime

_current_graph_task_id = private("current_graph_task_id")


@dataclass(slots=True)
class Streams:
    """The random numbers of one planned model.

    Args:
        seed: the same on all ranks of the mesh.
        coordinate: of this rank on all axes but tp: data-parallel ranks drop other elements.
        rank: on the tp axis.
        device: the type of the mesh's devices.
        calls: how often the model was called in training; each call has numbers of its own.

    Attributes:
        running: whether the model's forward runs.
        parked: the state of the common stream while a module draws its rank's own numbers.

    Raises:
        ValueError: torch gives no generators of such devices.
    """

    seed: int
    coordinate: tuple[int, ...]
    rank: int
    device: str
    calls: int = 0
    running: bool = False
    parked: Tensor | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu" and not hasattr(torch.get_device_module(self.device), "default_generators"):
            raise ValueError(
                f"torch.{self.device} has no default_generators, whose state dropout under tensor parallelism exchanges: set the model's "
                "dropout to 0"
            )

    @property
    def generator(self) -> torch.Generator:
        """torch's default generator of the device: what its operators draw from."""
        if self.device == "cpu":
            return torch.default_generator
        module = torch.get_device_module(self.device)
        return module.default_generators[module.current_device()]

    def begin(self) -> None:
        """Seed the generator for one call of the model."""
        self.generator.manual_seed(_number(self.seed, *self.coordinate, self.calls))
        self.calls += 1


def _number(*parts: object) -> int:
    """A seed that the parts determine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def _digest(state: Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


class OnModelStream:
    """Around the forward of the model: the generator has the model's state, and has the caller's again afterwards.

    Args:
        drawing: the modules that draw; where none of them is in training mode nothing happens.
    """

    def __init__(self, streams: Streams, drawing: Sequence[nn.Module]):
        self.streams, self.drawing = streams, drawing

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        streams = self.streams
        if streams.running or not any(one.training for one in self.drawing):
            return forward(*args, **kwargs)
        before = streams.generator.get_state()
        streams.begin()
        streams.running = True
        try:
            return forward(*args, **kwargs)
        finally:
            streams.running = False
            streams.generator.set_state(before)


class OnOwnStream:
    """Around the forward of a module that draws, inside a checkpoint: in the variants in which it begins to draw its rank's own
    numbers, it does. Afterwards the common stream is at the same place on all ranks.

    Args:
        draws: by variant, whose numbers the module draws.
        switches: the variants in which what is around it draws the common numbers, and it does not.
        drawing: the modules that draw, here and below.
    """

    def __init__(
        self,
        streams: Streams,
        regime: Regime,
        name: str,
        draws: Mapping[str, Draws],
        switches: frozenset[str],
        drawing: Sequence[nn.Module],
    ):
        self.streams, self.regime, self.name = streams, regime, name
        self.draws, self.switches, self.drawing = draws, switches, drawing

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        streams, variant = self.streams, self.regime.variant
        if not any(one.training for one in self.drawing):
            return forward(*args, **kwargs)
        if self.draws.get(variant) == "unseen" and vars(module)["p"] > 0:
            raise RuntimeError(
                f"{self.name} drops elements, which it did not when the plan was checked: whether tp ranks must drop the "
                "same is not known. Set its probability to 0"
            )
        if not streams.running and _current_graph_task_id() == -1:
            raise RuntimeError(
                f"{self.name} drops elements outside of the model's own forward, where tp ranks do not draw the numbers "
                "that they must: call the model that the plan was applied to, not a part of it"
            )
        if variant not in self.switches:
            return forward(*args, **kwargs)
        generator = streams.generator
        before = _digest(generator.get_state())
        generator.manual_seed(_number(before, "common"))
        streams.parked = generator.get_state()
        generator.manual_seed(_number(before, "own", streams.rank))
        try:
            return forward(*args, **kwargs)
        finally:
            generator.set_state(streams.parked)
            streams.parked = None


class OnCommonStream:
    """Around the forward of a module that drops elements of whole values, outside of a checkpoint, where what is around it draws
    its rank's own numbers.

    Args:
        switches: the variants in which that is so.
        drawing: the modules that draw, here and below.
    """

    def __init__(
        self, streams: Streams, regime: Regime, name: str, switches: frozenset[str], drawing: Sequence[nn.Module]
    ):
        self.streams, self.regime, self.name = streams, regime, name
        self.switches, self.drawing = switches, drawing

    def __call__(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict) -> Any:
        streams = self.streams
        if self.regime.variant not in self.switches or not any(one.training for one in self.drawing):
            return forward(*args, **kwargs)
        if streams.parked is None:
            raise RuntimeError(
                f"{self.name} is recomputed without the module around it that draws each tp rank's own numbers: checkpoint "
                "that module, or this one alone"
            )
        generator = streams.generator
        own = generator.get_state()
        generator.set_state(streams.parked)
        streams.parked = None
        try:
            return forward(*args, **kwargs)
        finally:
            streams.parked = generator.get_state()
            generator.set_state(own)
