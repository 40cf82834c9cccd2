"""Finding where the sequence is split before the blocks of a list, and gathered after them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from shardplan.compiler.layout.solver.draft import Draft, Options, Rules, partial_gradients
from shardplan.compiler.layout.solver.flow import Flow, Product
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ancestors, parent

GATHERS: Options = {"style": "gather_seq_input"}
GATHERED: Options = {"style": "sequence_parallel", "output": "gather"}  # after a module that works on slices
COMPLETE: Options = {**GATHERS, "grad": "complete"}  # where the tensor-parallel section has no block input here


class Ends:
    """Finds both ends in the unsharded run.

    Args:
        flow: the run.
        draft: the tensor-parallel rules.
        listing: the list of the blocks.
    """

    def __init__(self, flow: Flow, draft: Draft, listing: str):
        self.flow, self.draft, self.listing, self.tree = flow, draft, listing, flow.tree

    @cached_property
    def called(self) -> frozenset[str]:
        """The called modules."""
        return frozenset(event.module for event in self.flow.run.events if event.kind == "leave")

    @cached_property
    def starts(self) -> dict[str, int]:
        """Modules whose own code ran -> the number of the first operation."""
        numbered = reversed([*enumerate(self.flow.run.events)])
        return {event.module: number for number, event in numbered if event.kind == "op"}

    @cached_property
    def order(self) -> dict[str, int]:
        """Modules that ran -> the number of the last operation."""
        numbered = ((number, event) for number, event in enumerate(self.flow.run.events) if event.kind == "op")
        return {name: number for number, event in numbered for name in (event.module, *ancestors(event.module))}

    @property
    def first(self) -> str:
        """The block that runs first; empty where none runs."""
        return self.blocks[0]

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The blocks of the list, in the order of the run."""
        blocks = [name for name in self.tree.modules if parent(name) == self.listing and name in self.order]
        return tuple(sorted(blocks, key=lambda name: self.order[name]))

    @property
    def length(self) -> int:
        """The number of positions that the first block reads; 0 where it reads no sequence."""
        value = self._stream
        return 0 if value is None else self.flow.run.values[value].shape[1]

    def time_first(self, rows: int) -> bool:
        """Whether the first block reads [sequence, batch, features], as fairseq's do.

        Args:
            rows: those of the batch.
        """
        if self._stream is None:
            return False
        first, second = self.flow.run.values[self._stream].shape[:2]
        return second == rows != first

    @property
    def _stream(self) -> int | None:
        """The hidden states that the first block reads."""
        event = next(e for e in self.flow.run.events if e.kind == "enter" and e.module == self.first)
        values = self.flow.run.values
        return next((n for n in event.inputs if values[n].ndim > 2 and values[n].is_floating_point()), None)

    @property
    def pairs(self) -> Iterator[tuple[Rules, Rules]]:
        """Rules before and after the blocks that may belong together; those that communicate least come first."""
        for leave in self.exits:
            for enter in self.entrances:
                yield enter, leave
        norm = self.flow.last_norm(self.first)
        if norm is not None:  # the code between the blocks may need the whole sequence
            yield {self.tree.pattern(self.first): {"style": "split_seq_input"}}, {self.tree.pattern(norm): GATHERED}

    @property
    def entrances(self) -> Iterator[Rules]:
        """Rules before the blocks: a norm or the first block splits partial sums, or the first block splits whole values."""
        first: Rules = {self.first: {"style": "split_seq_input"}}
        if self.partial:
            norm = self._norm_in_front
            if norm is not None:
                own = partial_gradients(norm, self.tree.modules[norm])
                yield {**self.partial, norm: {"style": "split_seq_input"}, **own}
            yield {**self.partial, **first}
        yield first

    @property
    def _norm_in_front(self) -> str | None:
        """The norm whose result the first block reads, with only element-wise operations in between."""
        number = self._stream
        while number is not None and (made := self.flow.run.producers.get(number)) is not None:
            module = self.tree.modules.get(made.module)
            if module is not None and module.kind == "norm":
                return module.name if self.tree.pattern(module.name) == module.name else None
            sources = [one for one in made.inputs if self.flow.run.requires_grad[one]]
            number = sources[0] if len(sources) == 1 and sources[0] not in self.flow.run.parameters else None
        return None

    @cached_property
    def partial(self) -> Rules:
        """Rules for look-ups before the blocks whose results stay partial sums until they are split."""
        split = {p for p, o in self.draft.tensor_parallel.items() if o["style"] == "embedding_rowwise"}
        if not split:
            return {}
        rules: dict[str, Options] = {}
        for name in dict.fromkeys(made.name for made in self._before):
            module = self.tree.modules.get(name)
            if module is not None and module.kind == "embedding" and self.tree.pattern(name) == name:
                rules[name] = {"style": "embedding_rowwise_seq" if name in split else "embedding_replicated_seq"}
        return rules

    @property
    def _before(self) -> Iterator[Product]:
        """The multiplications and look-ups from which the first block's hidden states come."""
        queue = [] if self._stream is None else [self._stream]
        for number in queue:
            if (made := self.flow.products.get(number)) is not None:
                yield made
            elif (event := self.flow.run.producers.get(number)) is not None:
                known = (n for n in event.inputs if self.flow.run.requires_grad[n] or n in self.flow.products)
                queue += (n for n in known if n not in queue)  # a table may be frozen

    @property
    def exits(self) -> Iterator[Rules]:
        """Rules after the blocks: for the module that follows them, or for the output of a module around them."""
        after = self._after
        if after:
            yield self._exit(after)
            inside = [n for n in ancestors(after) if n and not self.listing.startswith(f"{n}.")]
            outer = [name for name in inside if name in self.called][-1:]
            for name in outer:
                yield {**self._by_token(name), name: GATHERED}
        reader = self._reader
        if reader:  # it is called even where a switch runs the blocks one by one, unlike a module around the blocks
            yield {reader: GATHERS}
            yield {reader: COMPLETE}
        around = [name for name in (self.listing, *ancestors(self.listing)) if name and name in self.called][
            : BOUNDS.around_list
        ]
        for name in around:
            yield {self.tree.pattern(name): {"style": "gather_seq_output"}}
        if not after and not around:
            yield {}

    @cached_property
    def _after(self) -> str:
        """The first module with parameters after the blocks; empty where there is none."""
        last = self.order[self.blocks[-1]]
        after = [
            name
            for name, module in self.tree.modules.items()
            if module.parameters and self.starts.get(name, -1) > last and self.tree.pattern(name) == name
        ]
        return min(after, key=lambda name: self.starts[name], default="")

    @property
    def _reader(self) -> str:
        """The module without parameters that is entered next after the blocks; empty where there is none."""
        after = self.flow.run.events[self.order[self.blocks[-1]] :]
        name = next((event.module for event in after if event.kind == "enter"), "")
        below = (m for other, m in self.tree.modules.items() if f"{other}.".startswith(f"{name}."))
        return name if name and self.tree.pattern(name) == name and not any(m.parameters for m in below) else ""

    def _exit(self, name: str) -> Rules:
        """The rule by which a module gathers the sequence: a norm at its output, the head at its input."""
        head = self.draft.tensor_parallel.get(name)
        if head is not None and head["style"] == "colwise_gather_output":
            return {name: {**head, "style": "colwise_seq_gather_output"}}
        if self.tree.modules[name].kind in ("linear", "conv1d"):
            return {name: {**COMPLETE, "optional": True}}  # optional, for classes with another head or none
        return {name: GATHERED}

    def _by_token(self, name: str) -> Rules:
        """Rules for the modules below a module, which work on a slice of the sequence."""
        below = (m for other, m in self.tree.modules.items() if other.startswith(f"{name}."))
        return {self.tree.pattern(m.name): {"style": "sequence_parallel"} for m in below if m.parameters}
