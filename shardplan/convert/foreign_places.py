"""The modules that an entry means: its key as a glob of shardplan's and, with a model, the names that the glob matches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from shardplan.core.tree import ModuleTree, full_name
from shardplan.language import GlobError, parse_glob

from .entries import NO_GLOB, Entry, NotConvertible, quoted


def glob_of_key(key: object) -> str:
    """The glob for a key of torch or transformers, where `*`, `?` and `[...]` match characters of one name segment.

    Raises:
        NotConvertible: SP543.
    """
    if not isinstance(key, str):
        raise NotConvertible(NO_GLOB, "a key is text", help="write the name of a module")
    if not key:
        raise NotConvertible(NO_GLOB, "the empty key means the model itself, for which a plan has no rule")
    if any(character in key for character in "{},"):
        raise NotConvertible(
            NO_GLOB, f"{quoted(key)}: `{{`, `}}` and `,` are plain characters there, and alternatives here"
        )
    glob = re.sub(r"\*+", "*", key)
    try:
        parse_glob(glob)
    except GlobError as error:
        raise NotConvertible(NO_GLOB, f"{quoted(key)} is not a glob: {error.reason}") from None
    return glob


class Places:
    """The names of a model.

    Args:
        tree: the model.
    """

    def __init__(self, tree: ModuleTree):
        self.tree = tree
        self._found: dict[str, tuple[str, ...]] = {}

    def of(self, globs: Iterable[str]) -> tuple[str, ...]:
        """The modules and parameters that any of the globs matches, by their names in the model."""
        return tuple(dict.fromkeys(name for glob in globs for name in self._of(glob)))

    def _of(self, glob: str) -> tuple[str, ...]:
        if glob not in self._found:
            pattern = parse_glob(glob)
            seen = self._seen if any(c in glob for c in "*?[{") else {glob: self._seen.get(glob, ())}
            self._found[glob] = tuple(n for seen_as, names in seen.items() if pattern.matches(seen_as) for n in names)
        return self._found[glob]

    @cached_property
    def _seen(self) -> dict[str, tuple[str, ...]]:
        """The names that rules match -> modules and parameters; there are several where a module has copies."""
        tree, seen = self.tree, dict[str, tuple[str, ...]]()
        modules = [""]
        for name in modules:
            modules += [child for _, child in tree.seen(name)]
        own = (
            full_name(name, parameter.name)
            for name in modules
            for parameter in tree.modules[name].parameters
            if parameter.adapter is None
        )
        for name in (*(modules if tree.base_prefix else modules[1:]), *own):
            seen[tree.address(name)] = (*seen.get(tree.address(name), ()), name)
        return seen

    def weighted(self, globs: Iterable[str], dims: int = 2) -> tuple[str, ...]:
        """The modules that the globs match and whose weight has at least `dims` dims; no parameters."""
        modules = self.tree.modules
        weights = {name: modules[name].parameter("weight") for name in self.of(globs) if name in modules}
        return tuple(name for name, weight in weights.items() if weight is not None and len(weight.shape) >= dims)

    def kinds(self, globs: Iterable[str]) -> frozenset[str]:
        """The kinds of the modules that any of the globs matches."""
        return frozenset(self.tree.modules[name].kind for name in self.of(globs) if name in self.tree.modules)

    def patterns(self, names: tuple[str, ...], glob: str | None) -> tuple[str, ...]:
        """Globs that match exactly these names: with `*` for list indices where all layers are meant, else the source's own
        glob, else the names one by one."""
        starred = dict.fromkeys(map(self._pattern, names))
        if sum(len(self._alike[pattern]) for pattern in starred) == len(names):
            return tuple(starred)
        return (
            (glob,)
            if glob is not None and set(self.of((glob,))) == set(names)
            else tuple(map(self.tree.address, names))
        )

    def merged(self, entries: Iterable[Entry]) -> list[Entry]:
        """Replace entries that are the same for each layer by one entry with `*`, at the position of the first."""
        groups: dict[tuple[str, str], list[Entry]] = {}
        names = {self.tree.address(name): name for alike in self._alike.values() for name in alike}
        for entry in entries:
            name = names.get(entry.pattern)
            key = entry.pattern if name is None else self._pattern(name)
            groups.setdefault((key, repr(entry.meaning)), []).append(entry)
        return [
            entry
            for (pattern, _), group in groups.items()
            for entry in (
                [replace(group[0], pattern=pattern)]
                if len({e.pattern for e in group}) == len(self._alike.get(pattern, ()))
                else group
            )
        ]

    def below(self, globs: Iterable[str]) -> str | None:
        """The one child of the model below which one of the globs matches; None where there is none, or several."""
        globs = tuple(globs)
        children = [child for child in self.tree.children[""] if any(self.of((f"{child}.{glob}",)) for glob in globs)]
        return children[0] if len(children) == 1 else None

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        """Patterns with `*` for list indices -> the names that they match."""
        found: dict[str, list[str]] = {}
        for name in (*self.tree.modules, *self.tree.parameters):
            if name and name not in self.tree.inside:
                found.setdefault(self._pattern(name), []).append(name)
        return found

    def _pattern(self, name: str) -> str:
        return self.tree.address(self.tree.pattern(name))
