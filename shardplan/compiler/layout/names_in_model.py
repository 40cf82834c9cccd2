"""Facts about a reduced model's modules, under the names of the model that it represents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from shardplan.core.by_key import by_key
from shardplan.core.layout import Layout
from shardplan.core.tree import ModuleTree, block, element, starred

Key = tuple[str, frozenset[tuple[str, str]]]
T = TypeVar("T")


class Alike:
    """Matches the model's modules with those of its reduced model. If the reduced model has all of them, each matches
    itself. Otherwise modules match if they have one pattern and are in blocks of one kind. The kind matters:
    `self_attn.k_proj` may read the tensor of `q_proj` in one kind of block, and a tensor of its own in another.

    Args:
        tree: the model's tree.
        reduced_tree: the reduced model's tree.
    """

    def __init__(self, tree: ModuleTree, reduced_tree: ModuleTree):
        self.tree = tree
        self._kinds = {id(one): _kinds(one) for one in (tree, reduced_tree)}
        self._reduced = reduced_tree
        self._same = tree.modules.keys() == reduced_tree.modules.keys()

    def everywhere(self, facts: Mapping[str, T]) -> Mapping[str, tuple[T, ...]]:
        """Each module of the model -> the distinct facts about the modules that it matches. `facts` has them by names
        of the reduced model. If nothing is known of a kind of block, the facts about all kinds."""
        if self._same:
            return {name: (fact,) for name, fact in facts.items() if name in self.tree.modules}
        keyed = [(self._key(self._reduced, name), fact) for name, fact in facts.items()]
        known, of_all = by_key(keyed), by_key((pattern, fact) for (pattern, _), fact in keyed)
        kinds = {kind for _, kind in known}
        found: dict[str, tuple[T, ...]] = {}
        for name in self.tree.modules:
            pattern, kind = self._key(self.tree, name)
            if here := known.get((pattern, kind)) if kind in kinds else of_all.get(pattern):
                found[name] = tuple(dict.fromkeys(here))
        return found

    def _key(self, tree: ModuleTree, name: str) -> Key:
        return self.tree.pattern(name), self._kinds[id(tree)].get(block(name), frozenset())


def _kinds(tree: ModuleTree) -> Mapping[str, frozenset[tuple[str, str]]]:
    """Each block -> its structure: the names of the modules in it, with list indices starred, each with its class."""
    inside = ((block(name), name, module.class_name) for name, module in tree.modules.items() if element(block(name)))
    found = by_key((home, (starred(name[len(home) :]), class_name)) for home, name, class_name in inside)
    return {name: frozenset(made) for name, made in found.items()}


def incoming_of(alike: Alike, incoming: Mapping[str, Layout]) -> Mapping[str, Layout]:
    """The incoming layouts of a model's modules, from its reduced model's, where all that match agree."""
    return {name: found[0] for name, found in alike.everywhere(incoming).items() if len(found) == 1}


def disagreeing(alike: Alike, incoming: Mapping[str, Layout]) -> tuple[str, ...]:
    """The model's modules whose incoming layout is unknown: the modules that they match in the reduced model have different ones."""
    return tuple(name for name, found in alike.everywhere(incoming).items() if len(found) > 1)


def modules_of(
    tree: ModuleTree, reduced_tree: ModuleTree, layers: tuple[int, ...], names: tuple[str, ...]
) -> tuple[str, ...]:
    """The modules or parameters of the model that those of its reduced model represent. If all with one pattern are
    given, these are in all layers, else in the layers that were copied."""
    here, there = ({*one.modules, *one.parameters} for one in (tree, reduced_tree))
    result: dict[str, None] = {}
    for name in names:
        pattern = tree.pattern(name)
        if all(other in names for other in there if tree.pattern(other) == pattern):
            result.update(
                (other, None) for other in (*tree.modules, *tree.parameters) if tree.pattern(other) == pattern
            )
            continue
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        moved = name
        if number is not None and number < len(layers):
            moved = name.replace(f".{number}.", f".{layers[number]}.", 1)
        result[moved if moved in here else name] = None
    return tuple(result)


def shared_reads_of(alike: Alike, reads: Mapping[str, str]) -> Mapping[str, str]:
    """The shared reads of a model's modules, from its reduced model's, where all that match agree."""
    relative = {name: first.removeprefix(_home(name)) for name, first in reads.items()}
    return {name: _home(name) + found[0] for name, found in alike.everywhere(relative).items() if len(found) == 1}


def same_arguments_of(
    alike: Alike, same: Mapping[str, Mapping[str, frozenset[str]]]
) -> Mapping[str, Mapping[str, frozenset[str]]]:
    """The arguments of a model's modules that are one tensor, from its reduced model's first match."""
    names = {name: name for name in same}
    return {name: same[found[0]] for name, found in alike.everywhere(names).items()}


def _home(name: str) -> str:
    return block(name) if element(block(name)) else ""
