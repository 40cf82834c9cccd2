"""Random operations in the model's own code: those that act on its results, and their places.

A model that draws nothing costs one comparison of the generators' states. If it draws, each place is drawn anew on
its own: a draw acts only if that changes a result. Layer drop of probability 0 draws a number and changes nothing.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.mesh import Axis
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import named, starred
from shardplan.model.rebinding import copied
from shardplan.model.reduced.generators import generator_states
from shardplan.model.reduced.lines import model_line
from shardplan.model.reduced.nests import tensors_in
from shardplan.model.reduced.trace import SourceLine
from shardplan.torchlib.private import private

RANDOM = Code("SP371")


_DispatchMode: Any = private("TorchDispatchMode")

OTHERS = "numbers of random or numpy.random"  # generators other than torch's
# What code asks of a draw may hold seldom: a draw between two bounds is tried at both, any other as the least and the greatest of many.
UNIFORM = ("rand", "rand_like", "uniform_")
SEEDS, MANY = (1, 2), 1000
# Python and numpy draw their numbers from such words; these give the least and the greatest. Others follow, as code may draw until a number suits it.
LEAST, GREATEST = 0, 0x12DD9BB3


@dataclass(frozen=True, slots=True)
class Site:
    """A place that draws.

    Args:
        module: the innermost module in whose forward it is.
        name: the operation, or the libraries whose generators moved.
        source: the line of the model's code; None for generators other than torch's.
    """

    module: str
    name: str
    source: SourceLine | None = None

    @property
    def key(self) -> tuple[str, str, SourceLine | None]:
        """The same place in all layers."""
        return (starred(self.module), self.name, self.source)


Key = tuple[str, str, SourceLine | None]
Redraw = Callable[[Callable[[], Any], tuple[float, float]], Any]  # (the draw, its bounds if it is uniform) -> numbers


class DrawnAlike(_DispatchMode):
    """While active, an operation's draws depend only on the shapes of its operands. So ranks draw the unsharded
    model's numbers for whole values, and other numbers for slices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        shapes = [list(one.shape) if isinstance(one, Tensor) else one for one in args]
        with _ONE_RANK, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(zlib.crc32(repr(shapes).encode()))
            return func(*args, **(kwargs or {}))


_ONE_RANK = threading.Lock()  # simulated ranks have one generator


def acting_sites(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Site, ...]:
    """The places whose random numbers change what the model returns, in the order of the run.

    Args:
        model: the model in training mode; it is not changed.
        inputs: keyword arguments of its forward.
    """
    first = DrawingRun()
    reference = _run(model, inputs, first)
    keys = tuple(dict.fromkeys(site.key for site in first.sites))
    idle = {key for key in keys[: BOUNDS.drawing_places] if not _acts(model, inputs, key, reference)}
    return tuple(site for site in first.sites if site.key not in idle)


def finding(model: str, sites: tuple[Site, ...], size: int, axis: Axis = Axis.TP) -> Diagnostic:
    """One finding for the model.

    Args:
        model: its name.
        sites: the places that act, at least one.
        size: the size of the axis.
    """
    modules = tuple(dict.fromkeys(site.module for site in sites if site.module))
    where = named(modules) if modules else model
    return Diagnostic(
        code=RANDOM,
        severity=Severity.ERROR,
        message=f"the code of {where} draws random numbers in training, "
        + (f"but they are not managed across {axis}={size}" if size > 1 else "from generators that are not torch's"),
        notes=tuple(
            f"{module or model}, {source.shown}" if source else f"{module or model}: {name}"
            for module, name, source in dict.fromkeys(site.key for site in sites)
        )[:6],
        help="switch them off in training (a probability of 0), or draw them outside the model and pass them as an input",
        modules=modules,
    )


class DrawingRun(TorchFunctionMode):
    """Finds the operations that move torch's generator, and the modules whose code runs them.

    Args:
        key: the place to draw anew.
        redraw: makes the new numbers.
        note: called with each place and the tensors that its operation reads.

    Attributes:
        sites: the places, in the order of the run.
        hidden: whether something other than an operation moved torch's generator.
    """

    def __init__(
        self,
        key: Key | None = None,
        redraw: Redraw | None = None,
        note: Callable[[Site, list[Tensor]], None] = lambda site, operands: None,
    ):
        super().__init__()
        self.sites: dict[Site, None] = {}
        self.hidden = False
        self.modules = [""]
        self.key, self.redraw, self.note = key, redraw, note
        self._last = torch.get_rng_state()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        before = self._moved()
        result = func(*args, **kwargs)
        self._last = torch.get_rng_state()
        if torch.equal(before, self._last):
            return result
        name = getattr(func, "__name__", "?")
        here = Site(self.modules[-1], name, model_line())
        self.sites[here] = None
        self.note(here, [*tensors_in(args), *tensors_in(kwargs)])
        if self.redraw is not None and here.key == self.key:
            bounds = (*args[1:], *kwargs.values(), 0.0, 1.0)[:2] if name == "uniform_" else (0.0, 1.0)
            with torch.random.fork_rng(devices=[]):  # later draws stay as they are
                return self.redraw(lambda: func(*args, **kwargs), bounds)
        return result

    def _moved(self) -> Tensor:
        """The generator's state; something else has drawn if it is not the one after the last operation."""
        state = torch.get_rng_state()
        self.hidden = self.hidden or not torch.equal(state, self._last)
        return state

    def run(self, model: nn.Module, inputs: Mapping[str, Any], named: nn.Module | None = None) -> Any:
        """What a model returns. Tracks which module runs, and which moves other generators.

        Args:
            named: the model whose modules give the names; None: the model itself. It is changed.
        """
        states: list[Any] = []
        inside: list[bool] = []  # whether something inside moved them

        def enter(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple) -> None:
                self.modules.append(name)
                states.append(generator_states()[1:])
                inside.append(False)

            return hook

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            name, moved = self.modules.pop(), inside.pop()
            if states.pop() != generator_states()[1:]:
                if not moved:
                    self.sites[Site(name, OTHERS)] = None
                if inside:
                    inside[-1] = True

        for name, module in (model if named is None else named).named_modules():
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self._last = torch.get_rng_state()
            with self:
                output = model(**inputs)
            self._moved()
        return output


def _acts(model: nn.Module, inputs: Mapping[str, Any], key: Key, reference: list[Tensor]) -> bool:
    """Whether other numbers at one place change the result."""
    if key[1] == OTHERS:
        if any(not _equal(_run(model, inputs, DrawingRun(), seed=seed), reference) for seed in SEEDS):
            return True
        return any(not _equal(_run(model, inputs, DrawingRun(), word=word), reference) for word in (LEAST, GREATEST))
    ways = [_seeded(seed) for seed in SEEDS]
    ways += [_least, _greatest] if key[1] in UNIFORM else [_of_many(torch.minimum), _of_many(torch.maximum)]
    return any(not _equal(_run(model, inputs, DrawingRun(key, way)), reference) for way in ways)


def _seeded(seed: int) -> Redraw:
    def redraw(draw: Callable[[], Any], bounds: tuple[float, float]) -> Any:
        torch.default_generator.manual_seed(seed)
        return draw()

    return redraw


def _least(draw: Callable[[], Any], bounds: tuple[float, float]) -> Any:
    return draw().fill_(bounds[0])


def _greatest(draw: Callable[[], Any], bounds: tuple[float, float]) -> Any:
    low, high = bounds
    result = draw()
    return result.fill_(high - (high - low) * torch.finfo(result.dtype).eps)  # the upper bound itself is not drawn


def _of_many(chosen: Callable[[Tensor, Tensor], Tensor]) -> Redraw:
    def redraw(draw: Callable[[], Any], bounds: tuple[float, float]) -> Any:
        result = draw()
        if not isinstance(result, Tensor):
            return result
        for _ in range(MANY):
            before = result.clone()
            result = draw()
            result.copy_(chosen(before, result))
        return result

    return redraw


def _run(
    model: nn.Module, inputs: Mapping[str, Any], draws: DrawingRun, seed: int = 0, word: int | None = None
) -> list[Tensor]:
    """The tensors that the model returns."""
    with _other_generators(seed, word):
        output = draws.run(copied(model), copy.deepcopy(dict(inputs)))
    return [value.detach() for value in tensors_in(output)]


def _equal(values: list[Tensor], reference: list[Tensor]) -> bool:
    return len(values) == len(reference) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in zip(values, reference, strict=True)
    )


@contextmanager
def _other_generators(seed: int, word: int | None) -> Iterator[None]:
    """Runs with a seed for those generators, or with one word for most of their numbers, then restores their states."""
    numpy = sys.modules.get("numpy")
    before, state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    python: Any = random.uniform.__self__  # type: ignore[attr-defined]
    if word is not None:
        words = [*[word] * 600, *range(1, 25)]
        random.setstate((3, (*words, 0), None))
        python._randbelow = lambda n: n - 1 if word else 0  # of many numbers it draws until one is below
        if numpy is not None:
            numpy.random.set_state(("MT19937", words, 0))
    try:
        yield
    finally:
        vars(python).pop("_randbelow", None)
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(state)
