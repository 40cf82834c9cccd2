"""The names of a tree that a glob matches, found by walking tree and glob side by side.

The glob's alternatives are merged into a trie of segments, so that a common beginning is walked once and a literal
segment is a look-up: the time is linear in the names that are reached, not in the names that there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from shardplan.core.globs import Glob, Segment
from shardplan.core.tree import ModuleTree

MOST_STARRED = 2000  # names with `*` for list indices; real models have some tens


@dataclass(frozen=True, slots=True)
class Reached:
    """The modules and parameters that a glob matches: their names in the model, in the tree's order."""

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)


@dataclass(eq=False, slots=True)
class _State:
    """A place between two segments of a glob."""

    final: bool = False
    loops: bool = False  # behind `**`: any segment leads here again
    literals: dict[str, _State] = field(default_factory=dict)
    patterns: dict[Segment, _State] = field(default_factory=dict)
    depth: _State | None = None  # reached by a `**` that stands for no segment

    def with_depth(self) -> Iterator[_State]:
        state: _State | None = self
        while state is not None:
            yield state
            state = state.depth


_States = tuple[_State, ...]


def _compile(glob: Glob) -> _States:
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
    return tuple(start.with_depth())


def _step(states: _States, segment: str) -> _States:
    """The states after one more segment of a name."""
    after: dict[_State, None] = {}
    for state in states:
        if state.loops:
            after[state] = None
        following = [state.literals[segment]] if segment in state.literals else []
        following += [to for pattern, to in state.patterns.items() if pattern.matches(segment)]
        for to in following:
            after.update(dict.fromkeys(to.with_depth()))
    return tuple(after)


def _literals(states: _States) -> set[str] | None:
    """The only segments that lead on, or None where a pattern may let others through."""
    if any(state.loops or state.patterns for state in states):
        return None
    return {text for state in states for text in state.literals}


class Names:
    """The names of one tree. Rules see them at `tree.address(name)`; what is returned are the names in the model."""

    def __init__(self, tree: ModuleTree):
        self.tree = tree

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.tree.modules)}

    def order(self, name: str) -> tuple[int, int]:
        """Where a module or parameter stands in the tree; a parameter right behind its module."""
        place = self._order.get(name)
        if place is not None:
            return place, -1
        module, parameter = self.tree.parameters[name]
        return self._order[module.name], module.parameters.index(parameter)

    def starred(self, modules_only: bool) -> tuple[str, ...]:
        """The names that rules see, list indices as `*`, each once; at most MOST_STARRED of them."""
        return self._starred_modules if modules_only else self._starred

    @cached_property
    def _starred_modules(self) -> tuple[str, ...]:
        return self._star(name for name in self.tree.modules if name or self.tree.base_prefix)

    @cached_property
    def _starred(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._starred_modules, *self._star(self.tree.parameters))))

    def _star(self, names: Iterable[str]) -> tuple[str, ...]:
        starred = (".".join("*" if p.isdecimal() else p for p in self.tree.address(n).split(".")) for n in names)
        return tuple(islice(dict.fromkeys(starred), MOST_STARRED))

    def reach(self, glob: Glob) -> Reached:
        """All modules and parameters whose whole name matches."""
        states = _compile(glob)
        prefix = self.tree.base_prefix
        for segment in prefix.split(".") if prefix else ():
            states = _step(states, segment)
        modules: list[str] = []
        parameters: list[str] = []
        if prefix and any(state.final for state in states):
            modules.append("")
        pending = [("", states)]
        while pending:
            name, states = pending.pop()
            if not states:
                continue
            parameters += self._parameters(name, states)
            for child, after in self._children(name, states):
                if any(state.final for state in after):
                    modules.append(child)
                pending.append((child, after))
        return Reached(tuple(sorted(modules, key=self.order)), tuple(sorted(parameters, key=self.order)))

    def _children(self, name: str, states: _States) -> Iterator[tuple[str, _States]]:
        base = f"{name}." if name else ""
        children = self.tree.children[name]
        literals = _literals(states)
        if literals is not None and len(literals) < len(children):
            children = tuple(base + text for text in literals if base + text in self.tree.modules)
        for child in children:
            after = _step(states, child[len(base) :])
            if after:
                yield child, after

    def _parameters(self, name: str, states: _States) -> Iterator[str]:
        base = f"{name}." if name else ""
        for parameter in self.tree.modules[name].parameters:
            if any(state.final for state in _step(states, parameter.name)):
                yield base + parameter.name
