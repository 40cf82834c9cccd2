"""Random operations in the model's own code: those that act on its results, and their places.

A model that draws nothing costs one comparison of the generators' states. If it draws, each place is drawn anew on
its own: a draw acts only if that changes a result. Layer drop of probability 0 draws a number and changes nothing.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
# What code asks of a draw may hold seldom: a draw between two bounds is tried at both, any other as the least and the greatest of many; where
# that changes nothing, one of few whole numbers as each of them, and others at the tenths of many. One of more numbers counts as acting.
UNIFORM = ("rand", "rand_like", "uniform_")
SEEDS, MANY, FEW, TENTHS = (1, 2), 1000, 100, range(1, 10)
LEAST, GREATEST = 0, 2**32 - 1  # of the words from which Python and numpy draw their numbers


@dataclass(frozen=True, slots=True)
class Site:
    """A place that draws.

    Args:
        module: the innermost module in whose forward it is.
        name: the operation, or the libraries whose generators moved.
        source: the line of the model's code; None for generators other than torch's.
        skipped: the modules that run, or whose code reads a parameter, only with some numbers.
    """

    module: str
    name: str
    source: SourceLine | None = None
    skipped: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return self.source.shown if self.source else self.name

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


def acting_sites(model: nn.Module, inputs: Mapping[str, Any], known: Collection[Key] = ()) -> tuple[Site, ...]:
    """The places whose random numbers change what the model returns, in the order of the run.

    Args:
        model: the model in training mode; it is not changed.
        inputs: keyword arguments of its forward.
        known: places that are left out.
    """
    first = DrawingRun()
    reference = _run(model, inputs, first)
    keys = [key for key in dict.fromkeys(site.key for site in first.sites) if key not in known]
    skipped = {key: _skipped(model, inputs, key, reference, first.ran) for key in keys[: BOUNDS.drawing_places]}
    skipped |= dict.fromkeys(keys[BOUNDS.drawing_places :], tuple(dict.fromkeys(first.ran)))  # untried
    return tuple(replace(site, skipped=names) for site in first.sites if (names := skipped.get(site.key)) is not None)


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
        ran: the modules that run, and those whose code reads a parameter, in the order of the run.
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
        self.ran: list[str] = []
        self.hidden = False
        self.modules = [""]
        self.key, self.redraw, self.note = key, redraw, note
        self._last = torch.get_rng_state()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.ran += [self.modules[-1] for one in args if isinstance(one, nn.Parameter)]
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
                self.ran.append(name)
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


def _skipped(
    model: nn.Module, inputs: Mapping[str, Any], key: Key, reference: list[Tensor], ran: list[str]
) -> tuple[str, ...] | None:
    """The modules that run only with some numbers at one place; None where other numbers change nothing."""
    runs: list[tuple[list[Tensor], list[str]]] = []

    def changes(redraw: Redraw | None = None, **generators: Any) -> bool:
        draws = DrawingRun(key, redraw)
        runs.append((_run(model, inputs, draws, **generators), draws.ran))
        return not _equal(runs[-1][0], reference)

    drawn: list[int] = []  # how many whole numbers a draw had
    if key[1] == OTHERS:
        acts = [changes(seed=one) for one in SEEDS] + [changes(word=one, drawn=drawn) for one in (LEAST, GREATEST)]
        words = (*range(1, FEW), *(GREATEST // 10 * one for one in TENTHS))
        acts = acts if any(acts) else [changes(word=one) for one in words]
    else:
        ends = [_least, _greatest] if key[1] in UNIFORM else [_tenth(one, drawn) for one in (0, 10)]
        acts = [changes(one) for one in (*map(_seeded, SEEDS), *ends)]
        between = map(_nth, range(1, min(FEW, max(drawn)))) if drawn else (_tenth(one, drawn) for one in TENTHS)
        acts = acts if any(acts) else [changes(one) for one in between]
    if not any(acts) and max(drawn, default=0) <= FEW:
        return None
    others = [one for _, one in runs if one != ran]
    unlike = dict.fromkeys(
        name for one in others for name in (Counter(one) - Counter(ran)) + (Counter(ran) - Counter(one))
    )
    return tuple(unlike or dict.fromkeys(ran if others else ()))


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


def _many(draw: Callable[[], Any]) -> Any:
    """Many draws in one tensor; what is drawn where that is none."""
    first = draw()
    return torch.stack([first.clone(), *(draw().clone() for _ in range(MANY))]) if isinstance(first, Tensor) else first


def _tenth(number: int, drawn: list[int]) -> Redraw:
    """What so many tenths of many draws are at most: 0 is the least, 10 the greatest.

    Args:
        drawn: gets how many whole numbers there are from the least to the greatest.
    """

    def redraw(draw: Callable[[], Any], bounds: tuple[float, float]) -> Any:
        many, result = _many(draw), draw()
        if not isinstance(many, Tensor):
            return result
        if not many.is_floating_point() and many.numel():
            drawn.append(int(many.max() - many.min()) + 1)
        return result.copy_(many.sort(0).values[number * MANY // 10])

    return redraw


def _nth(number: int) -> Redraw:
    """A whole number above the least of many draws."""

    def redraw(draw: Callable[[], Any], bounds: tuple[float, float]) -> Any:
        many, result = _many(draw), draw()
        whole = isinstance(many, Tensor) and not many.is_floating_point() and many.numel()
        return result.copy_((many.amin() + number).clamp(max=many.amax())) if whole else result

    return redraw


def _run(model: nn.Module, inputs: Mapping[str, Any], draws: DrawingRun, **generators: Any) -> list[Tensor]:
    """The tensors that the model returns."""
    with _other_generators(**generators):
        output = draws.run(copied(model), copy.deepcopy(dict(inputs)))
    return [value.detach() for value in tensors_in(output)]


def _equal(values: list[Tensor], reference: list[Tensor]) -> bool:
    return len(values) == len(reference) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in zip(values, reference, strict=True)
    )


@contextmanager
def _other_generators(seed: int = 0, word: int | None = None, drawn: list[int] | None = None) -> Iterator[None]:
    """Runs with a seed for those generators, or with one word for most of their numbers, then restores their states. Others follow, as code
    may draw until a number suits it.

    Args:
        drawn: gets how many whole numbers each draw of Python's may give.
    """
    numpy = sys.modules.get("numpy")
    before, state = random.getstate(), numpy.random.get_state() if numpy is not None else None
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    python: Any = random.uniform.__self__  # type: ignore[attr-defined]
    if word is not None:
        words = [*[_untempered(word)] * 600, *range(1, 25)]
        random.setstate((3, (*words, 0), None))
        below, calls = python._randbelow, itertools.count()

        def randbelow(n: int) -> Any:
            if drawn is not None:
                drawn.append(n)
            return min(word, n - 1) if next(calls) < len(words) else below(n)

        python._randbelow = randbelow
        if numpy is not None:
            numpy.random.set_state(("MT19937", words, 0))
    try:
        yield
    finally:
        vars(python).pop("_randbelow", None)
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(state)


def _untempered(word: int) -> int:
    """The part of a Mersenne Twister's state from which it draws a word."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    state = word
    for _ in range(5):
        state = word ^ ((state << 7) & 0x9D2C5680)
    word = state & GREATEST
    return word ^ (word >> 11) ^ (word >> 22)
