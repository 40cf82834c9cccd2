"""The layout that arrives at a module that takes R or I: as the layout check saw it, else from the plan's structure.

Megatron's scheme has one block input per block: values are R inside and I outside. Only the final norm's output leaves
a block region whole and is read by further matrix multiplications; whether it is R or I depends on its readers.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.layout import I, Layout, P, R
from shardplan.core.tree import ancestors
from shardplan.styles.bound import BoundModule
from shardplan.styles.boundary import InputBoundary


class IncomingLayouts:
    """The layouts that a plan's structure decides.

    Args:
        modules: the modules of the bound plan.
        seen: the result of the layout check: `ResolvedPlan.incoming`.
    """

    def __init__(self, modules: Mapping[str, BoundModule], seen: Mapping[str, Layout]):
        self.modules, self.seen = modules, seen
        self.outputs = {n: output for n, one in modules.items() if (output := one.boundary.output) is not None}

    def source(self, name: str, move: InputBoundary) -> Layout:
        """The layout of an argument. If several are accepted, it is the one that arrives, or the sum of an embedding that waits for this module."""
        if R in move.sources and I in move.sources:
            return self._incoming(name)
        return P if {I, P} <= {*move.sources} and self._waits_for(name) else move.sources[0]

    def _waits_for(self, name: str) -> bool:
        """Whether the sum of an embedding may wait for this block input: not if a whole value was seen here and the sum at another one."""
        if not any(output.until_block_input for output in self.outputs.values()):
            return False
        entrances = (other for other, one in self.modules.items() if one.link == "block_input")
        return self.seen.get(name) != I or not any(self.seen.get(other) == P for other in entrances)

    def output_layout(self, name: str) -> Layout:
        """The declared output of a module. If its readers decide, it is what the layout check found. If that did not
        run, it is R before an output head that takes R, else I."""
        output = self.outputs[name]
        if not output.unresolved_gradient:
            return output.destination
        return self.seen.get(name) or (R if self._free_readers() else I)

    def _incoming(self, name: str) -> Layout:
        if name in self.seen:
            return self.seen[name]
        gathers = [other for other, output in self.outputs.items() if output.gathers]
        return self._in_block_input(name) or (self.output_layout(gathers[-1]) if gathers else I)

    def _in_block_input(self, name: str) -> Layout | None:
        found = (self.modules[ancestor].boundary.within for ancestor in ancestors(name))
        return next((layout for layout in found if layout in (R, I)), None)

    def _free_readers(self) -> bool:
        """Whether modules outside every block input take R: output heads, and colwise rules of a plan without block inputs."""
        return any(
            move.destination == R and I in move.sources
            for name, one in self.modules.items()
            if one.boundary.within is None and self._in_block_input(name) is None
            for move in one.boundary.inputs
        )
