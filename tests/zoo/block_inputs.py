"""Where the gradients of what split parts read are reduced, and what each choice costs.

The gradient of what a split part reads is a partial sum. It is reduced at a *block input*: at the value that the part reads, or
at one further up that this is computed from. Between the block input and the part all gradients are partial sums: those of whole
parameters there are summed too, all of a block by one more all-reduce. So a choice of block inputs has a number of collectives, a
size for each token (the widths of the values at the block inputs), and a size whatever the number of tokens (the parameters after
block inputs). A block input further up may replace several further down (one in front of the latent matrices of latent attention, or of
two norms of one value), or none (it is wider than those it would replace): which is less is a matter of the model's sizes.

The values that may have a block input are those of the branches: the residual stream, what a block hands on, and sums that a
block reduces have complete gradients. What one line of code makes of one kind of values (the rows for each expert) has its
block inputs alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardplan.compiler.layout.solver.flow import Flow
from shardplan.core.tree import element
from shardplan.model.reduced.trace import Event

from .sizes import Sizes

Effect = Literal["whole", "split", "gathered", "logits", "sum", "scaled", "residual"]
WANTING: tuple[Effect, ...] = ("split", "gathered", "sum", "scaled")


class Size(NamedTuple):
    """How much is reduced, in elements. The first decides: a step has many tokens.

    Attributes:
        token: for each token.
        step: whatever their number.
    """

    token: float
    step: int

    def __add__(self, other: Size) -> Size:  # type: ignore[override]
        return Size(self.token + other.token, self.step + other.step)


NOTHING = Size(0, 0)
Frontier = Mapping[int, Size]  # number of collectives -> the least that is reduced with so many


def least(found: Iterable[tuple[int, Size]]) -> Frontier:
    """Those pairs that no other is as good as in both, and better in one."""
    best: dict[int, Size] = {}
    for count, size in sorted(found):
        if all(size < other for other in best.values()):
            best[count] = size
    return best


def joined(one: Frontier, other: Frontier) -> Frontier:
    """Of two independent parts of a model."""
    return least((a + b, one[a] + other[b]) for a in one for b in other)


def dominated(frontier: Frontier, count: int, size: Size) -> bool:
    """Whether a choice is as good in both, and better in one."""
    return any(n <= count and least <= size and (n, least) != (count, size) for n, least in frontier.items())


MOST_CHOICES = 200_000  # for one part


class TooManyChoices(Exception):
    """The least cannot be found by trying all choices."""


@dataclass(frozen=True)
class Part:
    """Values whose block inputs depend on each other.

    Args:
        groups: free values, those that are alike together, in the order of the run.
        block inputs: values that may have a block input, these among them.
    """

    groups: tuple[tuple[int, ...], ...]
    block_inputs: tuple[int, ...]


class BlockInputs:
    """The choices of a run.

    Args:
        flow: the run.
        effects: what each operation, by its results, makes. Values that are "split", or "gathered" as soon as they are split
            ("logits" are made of these), and partial sums ("sum") want all that they are made of after block inputs; a "scaled" sum wants
            its whole factors there. "residual": a sum with whole values added, whose gradient is complete. "whole" where none is said.
        sizes: how much values and parameters are.
        home: where a parameter's gradient is reduced with others; None of one that is split.
    """

    def __init__(
        self,
        flow: Flow,
        effects: Mapping[int, Effect],
        sizes: Sizes,
        home: Callable[[str], str | None],
    ):
        self.run, self.effects, self.sizes, self.home = flow.run, dict(effects), sizes, home
        self.made: dict[int, Event] = {}
        self.reading: dict[int, list[Event]] = {}
        for event in self.run.events:
            if event.kind in ("op", "read"):
                self.made.update((n, event) for n in event.outputs if n not in event.inputs)
                for number in dict.fromkeys(event.inputs):
                    self.reading.setdefault(number, []).append(event)
                self._note_written(event)

    def _note_written(self, event: Event) -> None:
        """What was written into a value in place is in what is read of it later."""
        if self._effect(event) != "whole":
            return
        of = {self._effect(self.made[n]) for n in event.inputs if n in self.made and self.made[n] is not event}
        found: Effect | None = "split" if "split" in of else None
        if found is None and event.kind == "read" and of & {"sum", "scaled", "residual"}:
            found = "residual"
        if found is not None:
            self.effects.update((n, found) for n in event.outputs if n not in event.inputs)

    @cached_property
    def frontier(self) -> Frontier:
        """Of a step: its backward reductions."""
        always = {name for event in self._splitting for n in event.inputs for name in self._parameters(n)}
        homes = {home for name in always if (home := self.home(name)) is not None}
        after = sum(self.sizes.parameter(name) for name in always if self.home(name) is not None)
        result: Frontier = {len(homes): Size(0, after)}
        for parts in self._together(homes):
            choices: dict[tuple[int, frozenset[str]], Size] = {(0, frozenset()): NOTHING}
            for part in parts:
                found: dict[tuple[int, frozenset[str]], Size] = {}
                for (count, at), size in choices.items():
                    for (more, other), least_ in self._choices(part).items():
                        key = count + more, (at | other) - homes
                        found[key] = min(found.get(key, size + least_), size + least_)
                choices = found
            result = joined(result, least((count + len(at), size) for (count, at), size in choices.items()))
        return result

    @cached_property
    def _splitting(self) -> tuple[Event, ...]:
        """The operations that want values after block inputs."""
        return tuple(e for e in self.run.events if self._effect(e) in WANTING)

    def _wanted(self, event: Event) -> list[int]:
        """What an operation wants after block inputs."""
        effect = self._effect(event)
        if effect not in WANTING:
            return []
        own = ("sum", "scaled", "residual") if effect == "scaled" else ("split",)
        return [n for n in self._read(event) if n not in self.made or self._effect(self.made[n]) not in own]

    def _effect(self, event: Event) -> Effect:
        return next((self.effects[n] for n in event.outputs if n in self.effects and n not in event.inputs), "whole")

    @cached_property
    def _roots(self) -> Mapping[int, frozenset[str]]:
        """Values made of parameters alone -> these."""
        found = {n: frozenset((name,)) for n, name in self.run.parameters.items()}
        for event in self.run.events:
            if event.kind in ("op", "read") and event.inputs and all(n in found for n in event.inputs):
                names = frozenset().union(*(found[n] for n in event.inputs))
                found.update((n, names) for n in event.outputs if n not in found)
        return found

    def _parameters(self, number: int) -> frozenset[str]:
        return self._roots.get(number, frozenset())

    def _read(self, event: Event) -> list[int]:
        """What an operation reads that has a gradient, without parameters."""
        return [n for n in dict.fromkeys(event.inputs) if self.run.requires_grad[n] and n not in self._roots]

    @cached_property
    def _complete(self) -> frozenset[int]:
        """Values whose gradient is complete: the residual stream, and what it is made of."""
        queue = []
        for event in self.run.events:
            if self._effect(event) == "residual":
                queue += self._read(event)
            if event.kind == "leave" and element(event.module):
                queue += event.inputs[:1]
        seen = set(queue)
        for number in queue:
            event = self.made.get(number)
            if event is not None and self._effect(event) == "whole":
                more = [n for n in self._read(event) if n not in seen]
                seen.update(more)
                queue += more
        return frozenset(seen)

    @cached_property
    def _free(self) -> Mapping[int, tuple]:
        """Values that may be after a block input -> a key. Those with the same key are after one together, or none is."""
        wanted = {n for event in self._splitting for n in self._wanted(event)}
        found: dict[int, tuple] = {}
        for event in reversed(self.run.events):
            if event.kind not in ("op", "read") or self._effect(event) != "whole":
                continue
            for number in event.outputs:
                if number in wanted and number in self.made and self.made[number] is event:
                    wanted.update(self._read(event))
                    if number not in self._complete and number not in self._roots:
                        found[number] = self._key(event, event.outputs.index(number))
        return found

    def _key(self, event: Event, position: int) -> tuple:
        """The key of what an operation makes: that of what it reads, where a block input before it would cost what one after it does."""
        read = self._read(event)
        if len(read) == 1 and not any(self._parameters(n) for n in event.inputs) and len(event.outputs) == 1:
            alone = len(self.reading[read[0]]) == 1 and self.sizes.value(read[0]) == self.sizes.value(event.outputs[0])
            if alone and read[0] not in self._complete and (before := self.made.get(read[0])) is not None:
                if self._effect(before) == "whole":
                    return self._key(before, before.outputs.index(read[0]))
        source = None if event.source is None else event.source.short
        return (*event.place[:2], event.name, position, source if event.place[2] != "atom" else None)

    def _together(self, paid: set[str]) -> Iterator[list[Part]]:
        """The parts, those together whose parameters are reduced together."""
        clusters: list[tuple[set[str], list[Part]]] = []
        for part in self._parts():
            homes = {h for group in part.groups for n in group for h in self._after(n)} - paid
            parts = [part]
            for other in [c for c in clusters if c[0] & homes]:
                clusters.remove(other)
                homes |= other[0]
                parts = other[1] + parts
            clusters.append((homes, parts))
        return (parts for _, parts in clusters)

    def _after(self, number: int) -> dict[str, list[str]]:
        """Home -> parameters that an operation reads."""
        found: dict[str, list[str]] = {}
        for name in {name for n in self.made[number].inputs for name in self._parameters(n)}:
            if (home := self.home(name)) is not None:
                found.setdefault(home, []).append(name)
        return found

    def _parts(self) -> Iterator[Part]:
        leader: dict[object, object] = {}

        def find(one: object) -> object:
            while leader.setdefault(one, one) != one:
                one = leader[one]
            return one

        alike: dict[tuple, list[int]] = {}
        for number in sorted(self._free):
            alike.setdefault(self._free[number], []).append(number)
            for read in self._read(self.made[number]):
                leader[find(read)] = find(number)
            leader[find(number)] = find(self._free[number])
        block_inputs = {n for event in self._splitting for n in self._wanted(event)}
        block_inputs |= {read for number in self._free for read in self._read(self.made[number])}
        parts: dict[object, tuple[list, list]] = {}
        for number in sorted(block_inputs | set(self._free)):
            parts.setdefault(find(number), ([], []))[1].append(number)
        for key, numbers in alike.items():
            parts[find(key)][0].append(tuple(numbers))
        return (Part(tuple(groups), tuple(numbers)) for groups, numbers in parts.values())

    def _choices(self, part: Part) -> Mapping[tuple[int, frozenset[str]], Size]:
        """(number of block inputs, where parameters are after them) -> the least that is reduced with them."""
        found: dict[tuple[int, frozenset[str]], Size] = {}
        # Asked of each of up to MOST_CHOICES placements.
        wanted = {n for n in part.block_inputs if any(n in self._wanted(event) for event in self.reading[n])}
        made_of = {n: frozenset(m for event in self.reading[n] for m in event.outputs) for n in part.block_inputs}
        reduced = {
            n: [(home, name) for home, names in self._after(n).items() for name in names]
            for group in part.groups
            for n in group
        }
        for after in self._placements(part):
            block_inputs = [
                n for n in part.block_inputs if n not in after and (n in wanted or not after.isdisjoint(made_of[n]))
            ]
            names = {pair for n in after for pair in reduced[n]}
            size = Size(sum(map(self.sizes.value, block_inputs)), sum(self.sizes.parameter(name) for _, name in names))
            key = len(block_inputs), frozenset(home for home, _ in names)
            found[key] = min(found.get(key, size), size)
        return found

    def _placements(self, part: Part) -> Sequence[frozenset[int]]:
        """The sets of values after block inputs: each has, with a value, all that is made of it."""
        found = [frozenset()]
        for group in part.groups:
            made_of = {read for number in group for read in self._read(self.made[number])}
            found = [
                one
                for after in found
                for one in ((after | set(group),) if made_of & after else (after, after | set(group)))
            ]
            if len(found) > MOST_CHOICES:
                raise TooManyChoices(f"there are too many places for block inputs in {self.made[group[0]].module}")
        read = {n: frozenset(self._read(self.made[n])) for group in part.groups for n in group}
        return [after for after in found if all(n in after or after.isdisjoint(read[n]) for n in read)]
