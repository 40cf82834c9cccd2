"""Streams of random numbers under tensor parallelism: one common to all tp ranks, and one for each rank.

As in Megatron-LM (arXiv 1909.08053), dropout of values that are whole on all ranks is the same on each rank, and dropout of
split values is not. All numbers come from torch's default generator, whose state is swapped. Activation checkpointing
restores that state, so it draws the forward's numbers again. Each new state is computed from the state before, and from
nothing else that changes.
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
        coordinate: this rank's, on all axes except tp: data-parallel ranks drop other elements.
        rank: this rank's, on the tp axis.
        device: the type of the mesh's devices.
        calls: how often the model was called in training; each call has other numbers.

    Attributes:
        running: whether the model's forward is running.
        parked: the state of the common stream while a module draws its rank's own numbers.

    Raises:
        ValueError: torch has no generators for such devices.
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
                f"torch.{self.device} has no default_generators, and dropout under tensor parallelism needs their state: set the "
                "model's dropout to 0"
            )

    @property
    def generator(self) -> torch.Generator:
        """torch's default generator of the device, which its operators draw from."""
        if self.device == "cpu":
            return torch.default_generator
        module = torch.get_device_module(self.device)
        return module.default_generators[module.current_device()]

    def begin(self) -> None:
        """Seed the generator for one call of the model."""
        self.generator.manual_seed(_number(self.seed, *self.coordinate, self.calls))
        self.calls += 1


def _number(*parts: object) -> int:
    """A seed computed from the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def _digest(state: Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


class OnModelStream:
    """Wraps the model's forward: the generator has the model's state in it, and the caller's state again afterwards.

    Args:
        drawing: the modules that draw; if none of them is in training mode, nothing happens.
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
    """Wraps the forward of a module that draws, inside of a checkpoint. In variants where the module begins to draw its rank's
    own numbers, it switches to them. Afterwards the common stream is at the same position on all ranks.

    Args:
        draws: variant -> which numbers the module draws.
        switches: the variants in which the code around it draws the common numbers, and the module does not.
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
                f"{self.name} drops elements, and did not when the plan was checked: it is not known whether tp ranks must drop the "
                "same ones. Set its probability to 0"
            )
        if not streams.running and _current_graph_task_id() == -1:
            raise RuntimeError(
                f"{self.name} drops elements outside of the model's own forward, where tp ranks do not draw the right numbers: call "
                "the model that the plan was applied to, not a part of it"
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
    """Wraps the forward of a module that drops elements of whole values, if the code around it draws its rank's own numbers. The
    wrapper is outside of a checkpoint.

    Args:
        switches: the variants with this case.
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
