"""The names of a tree that a glob matches, found by walking tree and glob together.

The glob's alternatives are merged into a trie of segments, so a common beginning is walked once and a literal segment
is a look-up. The time is linear in the names that are reached, not in all names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, islice

from shardplan.core.by_key import by_key
from shardplan.core.plan import Rule
from shardplan.core.sum_outputs import SumRule
from shardplan.core.tree import ModuleTree, full_name, starred
from shardplan.language.globs import Glob, Segment, parse_glob

MOST_STARRED = 2000  # names with `*` for list indices; real models have some tens


@dataclass(frozen=True, slots=True)
class Reached:
    """The modules and parameters that a glob matches, by their names in the model, layer by layer."""

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)


@dataclass(eq=False, slots=True)
class _State:
    """A place between two segments of a glob."""

    final: bool = False
    loops: bool = False  # after `**`: any segment leads here again
    literals: dict[str, _State] = field(default_factory=dict)
    patterns: dict[Segment, _State] = field(default_factory=dict)
    depth: _State | None = None  # reached by a `**` that matches no segment

    def with_depth(self) -> Iterator[_State]:
        state: _State | None = self
        while state is not None:
            yield state
            state = state.depth


class _Place:
    """All the states that a name may be in, and the next place for each segment; known places are reused."""

    __slots__ = ("after", "final", "literals", "states")

    def __init__(self, states: tuple[_State, ...]):
        self.states = states
        self.final = any(state.final for state in states)
        self.after: dict[str, _Place | None] = {}
        # The only segments that lead on; None where a pattern may let others through.
        free = any(state.loops or state.patterns for state in states)
        self.literals = None if free else tuple(dict.fromkeys(text for state in states for text in state.literals))


class _Walk:
    """A glob, ready to be walked along names."""

    def __init__(self, glob: Glob):
        start = _State()
        for alternative in glob.alternatives:
            state = start
            for segment in alternative:
                if segment.any_depth:
                    state.depth = state.depth or _State(loops=True)
                    state = state.depth
                elif segment.literal:
                    state = state.literals.setdefault(segment.text, _State())
                else:
                    state = state.patterns.setdefault(segment, _State())
            state.final = True
        self.places: dict[tuple[_State, ...], _Place] = {}
        self.start = self._place(tuple(start.with_depth()))

    def _place(self, states: tuple[_State, ...]) -> _Place:
        return self.places.get(states) or self.places.setdefault(states, _Place(states))

    def step(self, place: _Place, segment: str) -> _Place | None:
        """The place after one more segment of a name; None where no name continues so."""
        if segment not in place.after:
            after: dict[_State, None] = {}
            for state in place.states:
                if state.loops:
                    after[state] = None
                following = [state.literals[segment]] if segment in state.literals else []
                following += [to for pattern, to in state.patterns.items() if pattern.matches(segment)]
                for to in following:
                    after.update(dict.fromkeys(to.with_depth()))
            place.after[segment] = self._place(tuple(after)) if after else None
        return place.after[segment]


class Names:
    """The names of one tree. Rules match `tree.address(name)`; the methods return the names in the model."""

    def __init__(self, tree: ModuleTree):
        self.tree = tree
        self._known: dict[str, Mapping[str, list[str]]] = {}

    def starred(self, modules_only: bool) -> tuple[str, ...]:
        """The names as rules see them, with `*` for list indices, each once; at most MOST_STARRED of them."""
        return self._starred_modules if modules_only else self._starred

    @cached_property
    def _starred_modules(self) -> tuple[str, ...]:
        seen = (name for name in self.tree.modules if name not in self.tree.inside)
        return self._star(name for name in seen if name or self.tree.base_prefix)

    @cached_property
    def _starred(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._starred_modules, *self._star(self._parameters))))

    @property
    def _parameters(self) -> Iterator[str]:
        return (name for name, (_, parameter) in self.tree.parameters.items() if parameter.adapter is None)

    def _star(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(islice(dict.fromkeys(starred(self.tree.address(name)) for name in names), MOST_STARRED))

    def reach_of(self, rule: Rule | SumRule) -> Reached:
        """The names that a rule is for."""
        reached = self.reach(parse_glob(rule.pattern))
        if rule.having is None:
            return reached
        tree, below = self.tree, rule.having
        there = ((name, full_name(name, below)) for name in reached.modules)
        chosen = (
            inner in tree.modules or inner in tree.parameters or below in tree.modules[name].numbers
            for name, inner in there
        )
        return Reached(tuple(compress(reached.modules, chosen)))

    def reach(self, glob: Glob) -> Reached:
        """All modules and parameters whose whole name matches."""
        walk = _Walk(glob)
        place: _Place | None = walk.start
        prefix = self.tree.base_prefix
        for segment in prefix.split(".") if prefix else ():
            place = walk.step(place, segment) if place else None
        modules: list[str] = [""] if place and prefix and place.final else []
        parameters: list[str] = []
        pending = [("", place)] if place else []
        while pending:
            name, place = pending.pop()
            base = f"{name}." if name else ""
            for parameter in self.tree.modules[name].parameters:
                found = walk.step(place, parameter.short) if parameter.adapter is None else None
                if found and found.final:
                    parameters.append(base + parameter.name)
            following = []
            for segment, child in self._children(name, place):
                after = walk.step(place, segment)
                if after is not None:
                    following.append((child, after))
            pending += reversed([(child, after) for child, after in following if after.literals != ()])
            modules += [child for child, after in following if after.final]
        return Reached(tuple(modules), tuple(parameters))

    def _children(self, name: str, place: _Place) -> Sequence[tuple[str, str]]:
        """The children that may lead on: the last part of the name as rules see it, and the real name."""
        children = self.tree.seen(name)
        if place.literals is None or len(place.literals) >= len(children):
            return children
        named = self._by_segment(name)
        return [(text, child) for text in place.literals for child in named.get(text, ())]

    def _by_segment(self, name: str) -> Mapping[str, list[str]]:
        if name not in self._known:
            self._known[name] = by_key(self.tree.seen(name))
        return self._known[name]
