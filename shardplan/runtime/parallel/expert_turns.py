"""Whether all ranks of an exchange are in the same module of experts. If a rank skipped one, the others would wait for it, or
its rows would go into another module's exchange.

Each rank sends the number of its module with the numbers of its rows. If the forward of an enclosing module ends without a
call of the module of experts, the rank only exchanges these numbers, and says that it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardplan.core.by_key import by_key
from shardplan.core.tree import ancestors

from .process_groups import named_ranks


@dataclass(frozen=True, slots=True)
class Turn:
    """A module of experts, and its position in the model.

    Args:
        number: its position among the modules of experts, from 0.
        names: the names of all of them.
    """

    number: int
    names: tuple[str, ...]

    @property
    def absent(self) -> int:
        """The number that a rank sends in place of `number` if it does not call the module."""
        return ~self.number

    def compare(self, said: Sequence[int]) -> None:
        """Compare the numbers of all ranks. Call it on all ranks.

        Raises:
            RuntimeError: the ranks are not in the same module.
        """
        if len(set(said)) == 1:
            return
        where = by_key((number, rank) for rank, number in enumerate(said))
        listed = [
            f"ep {named_ranks(ranks, verbs)} {self.names[max(number, ~number)]}"
            for number, ranks in where.items()
            for verbs in [("calls", "call") if number >= 0 else ("does not call", "do not call")]
        ]
        raise RuntimeError(
            f"the ranks that exchange tokens must call their experts together, but in this forward {', and '.join(listed)}. Call the "
            "experts on every rank, without rows where there are no tokens: `experts(x[:0], ids[:0], weights[:0])`"
        )


class Exchanging(Protocol):
    """A module of experts that takes part in exchanges."""

    calls: int

    def say_absent(self, module: nn.Module) -> None: ...


class _Around:
    """Hooks of a module that contains modules of experts."""

    def __init__(self, inside: Iterable[tuple[nn.Module, Exchanging]]):
        self.inside = tuple(inside)
        self.before = [0] * len(self.inside)

    def begin(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # a graph would be recompiled for every number of calls
            self.before = [experts.calls for _, experts in self.inside]

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for before, (module_of_experts, experts) in zip(self.before, self.inside, strict=True):
            if experts.calls == before:
                experts.say_absent(module_of_experts)


def watch_experts(model: nn.Module, experts: Callable[[nn.Module], Exchanging | None]) -> None:
    """If a module of experts is not called in the forward of an enclosing module, make it tell the other ranks.

    Args:
        experts: module -> its exchange of tokens; None where it has none.
    """
    inside: dict[str, list[tuple[nn.Module, Exchanging]]] = {}
    for name, module in model.named_modules():
        if (found := experts(module)) is not None:
            for above in ancestors(name):
                inside.setdefault(above, []).append((module, found))
    for name, those in inside.items():
        around, module = _Around(those), model.get_submodule(name)
        module.register_forward_pre_hook(around.begin, prepend=True)
        module.register_forward_hook(around.end, prepend=True)
