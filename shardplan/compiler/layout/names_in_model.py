"""What is known of a reduced model's modules, under the names of the model that it stands for."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.layout import Layout
from shardplan.core.tree import ModuleTree, block, element


def incoming_of(tree: ModuleTree, incoming: Mapping[str, Layout]) -> Mapping[str, Layout]:
    """The incoming layouts of a model's modules, from those of its reduced model's, where all layers agree."""
    known: dict[str, set[Layout]] = {}
    for name, layout in incoming.items():
        known.setdefault(tree.pattern(name), set()).add(layout)
    return {name: next(iter(found)) for name in tree.modules if len(found := known.get(tree.pattern(name), set())) == 1}


def modules_of(
    tree: ModuleTree, reduced_tree: ModuleTree, layers: tuple[int, ...], names: tuple[str, ...]
) -> tuple[str, ...]:
    """The modules or parameters of a model that those of its reduced model stand for: every layer where all kinds of layers
    are among them, else the layers that were copied."""
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


def shared_reads_of(tree: ModuleTree, reads: Mapping[str, str]) -> Mapping[str, str]:
    """The shared reads of a model's modules, from those of its reduced model's, where all layers agree."""
    known: dict[str, set[str]] = {}
    for name, first in reads.items():
        known.setdefault(tree.pattern(name), set()).add(first.removeprefix(_home(name)))
    found = ((name, known.get(tree.pattern(name), set())) for name in tree.modules)
    return {name: _home(name) + next(iter(firsts)) for name, firsts in found if len(firsts) == 1}


def same_arguments_of(
    tree: ModuleTree, same: Mapping[str, Mapping[str, frozenset[str]]]
) -> Mapping[str, Mapping[str, frozenset[str]]]:
    """The arguments of a model's modules that are one tensor, from those of its reduced model's: of the first layer of each kind."""
    known: dict[str, Mapping[str, frozenset[str]]] = {}
    for name, found in same.items():
        known.setdefault(tree.pattern(name), found)
    return {name: known[tree.pattern(name)] for name in tree.modules if tree.pattern(name) in known}


def _home(name: str) -> str:
    return block(name) if element(block(name)) else ""
