"""The depths at which a model is traced, and the line through two of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, TypeVar

from torch import nn

from shardplan.compiler.lower.program import Program
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import FoundModel
from shardplan.model.reduced.layers import kinds, layer_lists

from .ledger import Ledger, Moment
from .overlap import Overlap
from .running_module import Place

_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class Depths:
    """How the layers of a model repeat.

    Args:
        lists: the module lists with one element for each layer.
        count: the number of all layers.
        head, tail: the numbers of first and of last layers that a cut model has one by one; between them are whole
            periods.
        period: the number of layers after which they repeat.
    """

    lists: tuple[str, ...]
    count: int
    head: int
    tail: int
    period: int

    @property
    def traced(self) -> tuple[int, ...]:
        """Two depths that differ by one period; only the whole depth where it is not larger than these."""
        low = self.head + self.tail
        return (low, low + self.period) if low + self.period < self.count else (self.count,)

    def aligned(self, name: str, depth: int) -> str | None:
        """A module's name with its layer counted from the nearer end of the model; None for layers between head and tail."""
        for start in (f"{listed}." for listed in self.lists):
            index, dot, rest = name.removeprefix(start).partition(".")
            if name.startswith(start) and index.isdecimal():
                if int(index) < self.head:
                    return name
                from_end = depth - int(index)
                return f"{start}-{from_end}{dot}{rest}" if from_end <= self.tail else None
        return name

    def like(self, name: str) -> str:
        """The name in the deepest traced model for a name in the whole model: that of an equal layer; names outside layers stay."""
        for start in (f"{listed}." for listed in self.lists):
            index, dot, rest = name.removeprefix(start).partition(".")
            if name.startswith(start) and index.isdecimal():
                at, depth = int(index), self.traced[-1]
                if at >= self.count - self.tail:
                    at += depth - self.count
                elif at >= self.head:
                    at = self.head + (at - self.head) % self.period
                return f"{start}{at}{dot}{rest}"
        return name

    def named(self, aligned: str) -> str:
        """The name in the whole model for a result of `aligned`."""
        for start in (f"{listed}.-" for listed in self.lists):
            if aligned.startswith(start):
                index, dot, rest = aligned.removeprefix(start).partition(".")
                return f"{start[:-1]}{self.count - int(index)}{dot}{rest}"
        return aligned


def depths_of(found: FoundModel, program: Program, *, gathers: bool = True) -> Depths:
    """How a model's layers repeat under a plan.

    Args:
        gathers: whether layers may be gathered before they run; if not, only the first and the last layer have different costs.
    """
    section, resolved = program.resolved.activation_checkpointing, program.resolved
    every = section.every if section is not None else 1
    if not gathers:
        return repeated(found, every, tail=1)
    ahead = 1
    if resolved.data_parallel is not None and (prefetch := resolved.data_parallel.prefetch) is not None:
        ahead = max(ahead, prefetch.forward or 0, prefetch.backward or 0)
    return repeated(found, every, ahead)


def repeated(found: FoundModel, every: int = 1, ahead: int = 1, tail: int | None = None) -> Depths:
    """How a model's layers repeat. A model without a configuration counts as one layer.

    Args:
        every: the period of the plan's rules: it treats each n-th layer alike.
        ahead: the number of layers that are gathered before they run.
        tail: the number of layers at the end that differ from those before; None is one more than `ahead`.
    """
    whole = Depths((), 1, 1, 0, 1)
    if found.config is None:
        return whole
    text = text_config(found.config)
    count = config_value(text, "num_hidden_layers")
    if not isinstance(count, int) or count < 1:
        return whole
    lists = layer_lists(found.tree, count)
    if not lists:
        return whole
    return _repeating(lists, kinds(found.tree, count, vars(text)), every, ahead, tail)


def _repeating(
    lists: tuple[str, ...], layers: Sequence[Any], every: int, ahead: int, tail: int | None = None
) -> Depths:
    """The repetition with the fewest layers to trace.

    Args:
        every: the plan treats each n-th layer alike.
        ahead, tail: the numbers of layers that must be on either side of the repeating ones.
    """
    count, tail = len(layers), ahead + 1 if tail is None else tail
    choices = [Depths(lists, count, count, 0, 1)]
    for repeats in range(1, count // 2 + 1):
        first = next((i + 1 for i in range(count - repeats - 1, -1, -1) if layers[i] != layers[i + repeats]), 0)
        period = lcm(repeats, every)
        before, after = (period * -(-n // period) for n in (ahead, tail))
        choices.append(Depths(lists, count, first + before, after + (count - first) % period, period))
    return min(choices, key=lambda choice: sum(choice.traced))


def cut(model: nn.Module, depths: Depths, depth: int) -> None:
    """Cut a model to its first layers."""
    for name in depths.lists:
        layers = model.get_submodule(name)
        assert isinstance(layers, nn.ModuleList | nn.Sequential), name
        del layers[depth:]


def restricted(program: Program, model: nn.Module) -> Program:
    """A program for a cut model, without the layers that were cut off."""
    present = {name for name, _ in model.named_modules()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    resolved = program.resolved
    return Program(
        replace(
            resolved,
            dp_units=_those(resolved.dp_units, present),
            dp_parts=_those(resolved.dp_parts, present),
            dp_experts=_those(resolved.dp_experts, present),
            dp_ignored=resolved.dp_ignored & parameters,
            ac_modules=_those(resolved.ac_modules, present),
            compile_modules=_those(resolved.compile_modules, present),
        ),
        {
            overlays: {name: module for name, module in modules.items() if name in present}
            for overlays, modules in program.variants.items()
        },
    )


def _those(names: Sequence[str], present: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in present)


def whole(ledgers: Sequence[Ledger], depths: Depths) -> Ledger:
    """The step of the whole model: measured, or read off the line through two depths. The layers between the first and the last
    ones cost no more than the larger of these, so their peaks are not higher than both."""
    if len(ledgers) == 1:
        return ledgers[0]
    low, high = ledgers
    steps = (depths.count - depths.traced[0]) // depths.period
    short, long = (_aligned(one, depths, depth) for one, depth in zip(ledgers, depths.traced, strict=True))
    assert short.keys() == long.keys(), sorted(set(short) ^ set(long))[:5]

    def line(a: int, b: int) -> int:
        return a + steps * (b - a)

    def lines(a: Mapping[_K, int], b: Mapping[_K, int]) -> dict[_K, int]:
        return {key: line(a.get(key, 0), b.get(key, 0)) for key in a.keys() | b.keys()}

    moments = {
        (phase, depths.named(name)): Moment(lines(a.peak, b.peak), lines(a.most, b.most))
        for (phase, name), a in short.items()
        for b in (long[phase, name],)
    }
    return Ledger(
        moments,
        lines(low.flops, high.flops),
        lines(low.calls, high.calls),
        lines(low.bytes, high.bytes),
        line(low.stored, high.stored),
        line(low.touched, high.touched),
        Overlap(lines(low.overlap.sent, high.overlap.sent), lines(low.overlap.products, high.overlap.products)),
        high.parts,
    )


def _aligned(ledger: Ledger, depths: Depths, depth: int) -> Mapping[Place, Moment]:
    return dict(_alignments(ledger, depths, depth))


def _alignments(ledger: Ledger, depths: Depths, depth: int) -> Iterator[tuple[Place, Moment]]:
    for (phase, name), moment in ledger.moments.items():
        if (aligned := depths.aligned(name, depth)) is not None:
            yield (phase, aligned), moment
