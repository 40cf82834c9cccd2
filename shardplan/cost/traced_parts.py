"""The parts of a model from which pipeline stages are made, and the one that runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from shardplan.core.plan import ResolvedPlan
from shardplan.model.reduced.nests import tensors_in

from .running_module import Place

SHARED, FIRST, LAST = "what every stage runs", "the first stage's", "the last stage's"


@dataclass(frozen=True, slots=True)
class PartNames:
    """Modules and parameters by full name: the blocks in order, those that only the first or the last stage has, and the modules
    whose output is sent to later stages too."""

    blocks: tuple[str, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    carried: tuple[str, ...] = ()

    @classmethod
    def of(cls, resolved: ResolvedPlan) -> PartNames:
        """The parts of a compiled plan."""
        return cls(resolved.pp_blocks, resolved.pp_first, resolved.pp_last, resolved.pp_carried)

    def within(self, present: Collection[str]) -> PartNames:
        """The parts that are left in a model with these modules."""
        return replace(
            self,
            blocks=tuple(name for name in self.blocks if name in present),
            carried=tuple(name for name in self.carried if name in present),
        )


class Parts:
    """Follows which part runs: a block by its name, or one of SHARED, FIRST and LAST.

    A place may be in no part. In the forward, it then belongs to every stage before the blocks, to the block before it
    between them, and to the last stage after them. In the backward, it belongs to the part whose backward ran last.
    """

    def __init__(self, names: PartNames) -> None:
        self.names = names
        self.handed: dict[str, int] = {}  # bytes of the first result of each block, and of carried modules' results
        self._of = {name: name for name in names.blocks}
        self._of |= dict.fromkeys(names.first, FIRST) | dict.fromkeys(names.last, LAST)
        self._phase, self._now = "", SHARED

    def of(self, name: str) -> str | None:
        """The part of a module or parameter; None where it is in none."""
        while name and name not in self._of:
            name = name.rpartition(".")[0]
        return self._of.get(name)

    def at(self, place: Place) -> str:
        """The part that runs at a place; call it for the places in order."""
        phase, module = place
        if phase != self._phase:
            self._phase, self._now = phase, LAST if phase == "backward" else SHARED
        if (part := self.of(module)) is not None:
            self._now = part
        elif phase == "forward":
            if self._now == FIRST:
                self._now = SHARED
            elif self._now == self.names.blocks[-1]:
                self._now = LAST
        return self._now

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name in {*self.names.blocks, *self.names.carried}:
            handles.append(model.get_submodule(name).register_forward_hook(self._end(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _end(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            made = [x for x in tensors_in(output) if isinstance(x, Tensor)]
            made = made if name in self.names.carried else made[:1]
            self.handed[name] = sum(x.nbytes for x in made)

        return hook
