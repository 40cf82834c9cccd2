"""Choosing the layers of the original that the reduced model keeps: each kind once, in order."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardplan.core.tree import ModuleTree

from .fields import role

Signature = tuple[tuple[Any, ...], ...]
Listings = list[tuple[str, tuple[str, ...]]]
NUMBER = re.compile(r"\.\d+(?=\.|$)")
PART = re.compile(r"[._]\d+(?=\.|$)")  # also in names of a dictionary's parts: `expert_0`
SERIAL = 4  # an integer with more different values over the layers numbers them: no difference in kind


@dataclass(frozen=True, slots=True)
class Kept:
    """Layers of the original, by index.

    Args:
        count: the number of the original's layers.
        layers: the kept ones, ascending.
    """

    count: int
    layers: tuple[int, ...]

    def of(self, values: Sequence[Any]) -> list[Any]:
        """The kept layers' elements of a list with one element per layer."""
        return [values[i] for i in self.layers]

    def indices(self, indices: Iterable[int]) -> list[int]:
        """A list of layer indices, in the numbering of the kept layers."""
        return [self.layers.index(i) for i in indices if i in self.layers]

    def of_each(self, values: Sequence[Any]) -> list[Any]:
        """As `of`. Where the elements of the list name layers, each becomes the last kept layer up to the named one."""
        return [max(0, self.before(v + 1) - 1) for v in self.of(values)] if _names_layers(values) else self.of(values)

    def before(self, index: int) -> int:
        """The number of kept layers before the original's layer `index`."""
        return sum(i < index for i in self.layers)


def candidates(
    tree: ModuleTree, count: int, config: Mapping[str, Any], others: Sequence[Hashable] = (), least: int = 1
) -> tuple[Kept, ...]:
    """Choices of layers to try, the fewest first: the first of each kind; all layers up to the last of these, for rules
    like "every fourth layer"; the same two choices with the first two of each kind, for layers that share weights.

    Where all layers are of one kind, two are kept. `least` is the lower bound, as far as the model has so many.

    Layers are of one kind if they have the same modules, parameters and flags, the same entries in each list of the
    configuration with one entry per layer, and the same entry in `others`, where this is given.
    """
    signatures: list[Any] = kinds(tree, count, config)
    if others:
        signatures = list(zip(signatures, others, strict=True))
    seen = Counter[Any]()
    first, twice = [], []
    for i, signature in enumerate(signatures):
        seen[signature] += 1
        if seen[signature] == 1:
            first.append(i)
        if seen[signature] <= 2:
            twice.append(i)
    fewest = first if len(seen) > 1 else twice
    choices = (fewest, range(fewest[-1] + 1), twice, range(twice[-1] + 1))
    enough = (_at_least(least, tuple(choice), count) for choice in choices)
    return tuple(Kept(count, layers) for layers in dict.fromkeys(enough))


def _at_least(least: int, layers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The layers, with the first of the others added up to a number of `least`."""
    more = [i for i in range(count) if i not in layers][: max(0, least - len(layers))]
    return tuple(sorted((*layers, *more)))


def kinds(tree: ModuleTree, count: int, config: Mapping[str, Any]) -> list[Signature]:
    """For each layer a value that is equal for layers of one kind."""
    return [(structure, *_listed(config, count, i)) for i, structure in enumerate(_structures(tree, count))]


def layer_lists(tree: ModuleTree, count: int) -> tuple[str, ...]:
    """The names of the module lists that have one element per layer."""
    return tuple(name for name, _ in _lists(tree, count))


def skeleton(tree: ModuleTree, names: Iterable[str], layers: Iterable[int]) -> list[Any]:
    """The facts that a reduced layer must share with its original: the classes of its modules, and their parameters'
    names and dimensions. Numbered parts (experts) count as one part.

    Args:
        tree: the original's or the reduced model's.
        names: the module lists of the layers.
        layers: the indices of their elements.
    """
    listings = [(name, tree.children[name]) for name in names]
    return [
        frozenset(
            (
                PART.sub(".*", name),
                class_name,
                tuple((p, len(shape)) for p, shape in parameters),
            )
            for name, class_name, parameters, _ in _layer(tree, listings, i)
        )
        for i in layers
    ]


def _structures(tree: ModuleTree, count: int) -> list[Signature]:
    """For each layer, everything that distinguishes it: modules, shapes, and integers that do more than
    number the layers."""
    listings = _lists(tree, count)
    layers = [_layer(tree, listings, i) for i in range(count)]
    values: defaultdict[tuple[str, str], set[Any]] = defaultdict(set)
    for layer in layers:
        for name, _, _, numbers in layer:
            for key, value in numbers:
                values[name, key].add(value)
    serial = {key for key, seen in values.items() if len(seen) > SERIAL or re.search("(idx|index|_id)$", key[1])}
    return [
        tuple(
            (name, cls, parameters, tuple((k, v) for k, v in numbers if (name, k) not in serial))
            for name, cls, parameters, numbers in layer
        )
        for layer in layers
    ]


def _layer(tree: ModuleTree, listings: Listings, index: int) -> list[tuple[str, str, tuple[Any, ...], tuple[Any, ...]]]:
    """The modules of one layer, over all listings: relative name, class, parameters, integers."""
    result = []
    for listing, children in listings:
        top = children[index]
        for name, module in _below(tree, top):
            relative = f"{NUMBER.sub('.*', listing)}{name.removeprefix(top)}"
            parameters = tuple((p.name, p.shape) for p in module.parameters)
            numbers = tuple((k, v) for k, v in module.numbers.items() if isinstance(v, int))
            result.append((relative, module.class_name, parameters, numbers))
    return result


def _lists(tree: ModuleTree, count: int) -> Listings:
    """The outermost module lists with that many elements, and their elements."""
    found: Listings = []
    for name, module in tree.modules.items():
        children = tree.children[name]
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if module.kind == "list" and len(children) == count and not inside:
            found.append((name, children))
    return found


def _below(tree: ModuleTree, top: str) -> list[tuple[str, Any]]:
    result, stack = [], [top]
    while stack:
        name = stack.pop()
        result.append((name, tree.modules[name]))
        stack.extend(reversed(tree.children[name]))
    return result


def _listed(config: Mapping[str, Any], count: int, index: int) -> list[Any]:
    """The entries for one layer in the configuration's lists."""
    entries = []
    for name, value in config.items():
        if not isinstance(value, (list, tuple)) or role(name) == "token":
            continue
        if role(name) == "layer_indices":
            entries.append((name, index in value))
        elif len(value) == count and all(isinstance(item, (str, int, float)) for item in value):
            entries.append(
                (name, value[index] == index if role(name) is None and _names_layers(value) else value[index])
            )
    return [*entries, *((name, index in part) for name, part in sections(config, count).items())]


def sections(config: Mapping[str, Any], count: int) -> dict[str, range]:
    """The layers of each section of a model, in order (for example those before, inside and after a loop). The configuration
    has the number of each section, and the numbers add up to all layers."""
    numbers = {
        name: value
        for name, value in config.items()
        if name.endswith("_layers") and type(value) is int and value >= 0 and role(name) is None
    }
    ends = [*accumulate(numbers.values())]
    if len(ends) < 2 or ends[-1] != count:
        return {}
    return {name: range(end - numbers[name], end) for name, end in zip(numbers, ends, strict=True)}


def _names_layers(values: Sequence[Any]) -> bool:
    """Whether the elements of a list with one element per layer are layer indices."""
    return all(type(v) is int and 0 <= v < len(values) for v in values) and len(set(values)) > SERIAL
