"""The fewest collectives of a step, from the unsharded run and the list of what is split: nothing of the program is read.

A matrix that is split by its output features makes a split value, one that is split by its input features makes of it a
partial sum, as does a table that is split by rows. Partial sums may be added to each other and to whole values, cut and
reshaped; anything else needs the sum, which is then reduced once, whatever reads it. What must be reduced forward must be
reduced backward: the gradient of what a split part reads is a partial sum (Megatron-LM, arXiv 1909.08053); of the table's
rows it need not, of the head's input it must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from shardplan.synth.flow import Flow, Product
from shardplan.twin.trace import Event

Features = Literal["out", "in", "rows"]

# What hands a sum on as a sum of what it is given.
LINEAR = frozenset(
    """__add__ __radd__ __iadd__ add add_ sub __sub__ __getitem__ view reshape transpose permute contiguous to float type_as
    clone squeeze unsqueeze flatten unflatten expand chunk split index_select gather dropout index_add_ index_add
    zeros_like sum movedim __setitem__ cat index_copy_ scatter_add_ type half bfloat16 detach T.__get__ masked_scatter""".split()
)
# These too, by a whole factor.
SCALING = frozenset("mul __mul__ __rmul__ div __truediv__ mul_ __imul__".split())


class Reductions:
    """Counts what must be reduced forward.

    Args:
        flow: the unsharded run.
        split: module or parameter -> which of its features are split.
    """

    def __init__(self, flow: Flow, split: Mapping[str, Features]):
        self.flow, self.split = flow, split
        self.kinds: dict[int, str] = {}
        self.roots: dict[int, int] = {}
        self.count = 0
        self.where: list[str] = []
        for event in flow.run.events:
            if event.kind == "op":
                self._step(event)

    def kind(self, number: int) -> str:
        """ "whole", "split" or "sum"."""
        return self.kinds.get(self.roots.get(number, number), "whole")

    def _step(self, event: Event) -> None:
        made: Product | None = next((self.flow.products[n] for n in event.outputs if n in self.flow.products), None)
        features = None if made is None else self.split.get(made.name)
        given = [self.kind(n) for n in event.inputs]
        if features == "rows" or (features == "in" and "split" in given):
            self._give(event, "sum")
        elif features == "out" or "split" in given or self._reads_split_parameter(event):
            self._reduce(event)
            self._give(event, "split")
        elif "sum" in given:
            if event.name in LINEAR or (event.name in SCALING and given.count("sum") == 1):
                self._pass(event)
            else:
                self._reduce(event)

    def _reads_split_parameter(self, event: Event) -> bool:
        names = (self.flow.run.parameters.get(n) for n in event.inputs)
        return any(name in self.split for name in names if name is not None)

    def _give(self, event: Event, kind: str) -> None:
        for number in event.outputs:
            self.roots.pop(number, None)
            self.kinds[number] = kind

    def _pass(self, event: Event) -> None:
        sums = [n for n in event.inputs if self.kind(n) == "sum"]
        for number in event.outputs:
            if len(event.inputs) == 1 and number != sums[0]:
                self.roots[number] = self.roots.get(sums[0], sums[0])  # the same sum under another shape
            else:
                self.roots.pop(number, None)
                self.kinds[number] = "sum"

    def _reduce(self, event: Event) -> None:
        for number in event.inputs:
            if self.kind(number) == "sum":
                self.kinds[self.roots.get(number, number)] = "whole"
                self.count += 1
                self.where.append(f"{event.module} {event.name}")
