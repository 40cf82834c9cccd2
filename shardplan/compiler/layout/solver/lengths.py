"""The lengths of a packed matrix's parts, as expressions over the numbers of a configuration that hold for the reduced
model and for the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property, partial
from itertools import combinations_with_replacement, islice, product

from torch import nn

from shardplan.core.by_key import by_key
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, ParameterInfo, full_name, is_count
from shardplan.model.reduced.measured import shapes_with
from shardplan.styles import feature_dim
from shardplan.styles.style_record import Features

from .channels import Part, cut, parts_of
from .flow import Flow, Product


@dataclass(frozen=True, slots=True)
class Length:
    """A number, and the expression for it in a plan.

    Args:
        words: an expression over the numbers of the configuration.
        reduced, full: its values in the reduced model and in the model itself.
        likeness: how likely the words are: 1 where the shape depends on the number, plus their likeness (0 to 1) to the name
            of an attribute with these values.
    """

    words: str
    reduced: int
    full: int
    likeness: float = 0.0


@dataclass(frozen=True, slots=True)
class Sized:
    """A part and its expressions.

    Args:
        part: the part that was found.
        heads: the number of its heads; None where none were found.
        size: the number of features of a head; for a part without heads, of the part.
    """

    part: Part
    heads: Length | None
    size: Length | None

    @property
    def full(self) -> int:
        """The part's length in the model itself."""
        return (self.heads.full if self.heads else 1) * (self.size.full if self.size else 1)

    @property
    def words(self) -> str:
        return " * ".join(one.words for one in (self.heads, self.size) if one is not None)

    @property
    def likeness(self) -> float:
        return sum(one.likeness for one in (self.heads, self.size) if one is not None)


class Lengths:
    """Finds expressions.

    Args:
        reduced_tree, tree: those of the reduced model and of the model itself.
        model: the reduced model.
        owners: modules whose code uses the numbers, from both trees.
    """

    def __init__(
        self,
        reduced_tree: ModuleTree,
        tree: ModuleTree,
        model: nn.Module,
        owners: Sequence[tuple[ModuleInfo, ModuleInfo]] = (),
    ):
        self.reduced_tree, self.tree, self.owners = reduced_tree, tree, owners
        self._shapes_with = cache(partial(shapes_with, model))

    @cached_property
    def attributes(self) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """The values in the reduced model and in the model itself -> the attributes of the owners with these values."""
        return counted_by(
            (name, value, full.numbers.get(name))
            for reduced, full in self.owners
            for name, value in reduced.numbers.items()
        )

    def parts(self, parts: Sequence[Part], size: int, of: str) -> Iterator[tuple[Sized, ...]]:
        """Expressions for the parts of a matrix, the most likely first.

        Args:
            size: their total length in the model itself.
            of: the full name of the matrix.
        """
        kinds = list(dict.fromkeys(parts))
        choices = [list(self._sized(part, of)) for part in kinds]
        chosen = (dict(zip(kinds, one, strict=True)) for one in islice(product(*choices), BOUNDS.expressions_together))
        sized = (tuple(named[part] for part in parts) for named in chosen)
        fitting = (one for one in sized if sum(part.full for part in one) == size)
        yield from sorted(fitting, key=lambda one: -sum(part.likeness for part in one))

    def packed(self, flow: Flow, made: Product, size: int | None) -> int | list[str] | None:
        """The parts into which the code cuts a matrix's result, in a rule's words: a number of equal parts, or an expression for each
        part. None where it is not cut, or where nothing holds for both the reduced model and the model itself.

        Args:
            flow: the run of the reduced model.
            size: the total length in the model itself; None where it is unknown, so that only equal parts can be found.
        """
        lengths, value = cut(flow, made), made.outputs[0]
        if len(set(lengths)) == 1:
            return len(lengths)
        if not lengths or size is None:
            return None
        told = parts_of(flow, value, flow.run.values[value].ndim - 1)
        parts = told if tuple(part.length for part in told) == lengths else tuple(map(Part, lengths))
        found = next(self.parts(parts, size, matrix_of(flow.tree, made.name)), None)
        return None if found is None else [one.words if self._numbers else str(one.full) for one in found]

    def _sized(self, part: Part, of: str) -> Iterator[Sized]:
        if part.heads is None:
            yield from (Sized(part, None, one) for one in self.called(part.length, of))
            return
        width = part.length // part.heads
        widths = [None] if width == 1 else list(self.called(width, of))
        yield from (Sized(part, count, one) for count in self.called(part.heads, of) for one in widths)

    def called(self, value: int, of: str) -> Iterable[Length]:
        """The expressions for a number of the reduced model, the most likely first; for a model without a configuration, it is the
        number itself.

        Args:
            of: the full name of a parameter. Numbers on which its shape depends are more likely than others with the same value.
        """
        single = [self._length(name, value, of) for name, known in self._numbers.items() if known == value]
        found = sorted(single, key=lambda one: -one.likeness)[: BOUNDS.expressions]
        return (
            found or list(islice(self._products(value, of), BOUNDS.expressions)) or [Length(str(value), value, value)]
        )

    def _shapes(self, number: str, parameter: str) -> bool:
        """Whether the shape of a parameter depends on a number."""
        changed = self._shapes_with(number)
        return changed is not None and changed.get(parameter) != self.reduced_tree.parameters[parameter][1].shape

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        full = self.tree.numbers
        known = self.reduced_tree.numbers.items()
        return {n: v for n, v in known if is_count(v) and "." not in n and is_count(full.get(n))}

    def _length(self, words: str, value: int, of: str) -> Length:
        full = int(self.tree.numbers[words])
        likeness = max((_likeness(words, name) for name in self.attributes.get((value, full), ())), default=0.0)
        return Length(words, value, full, self._shapes(words, of) + likeness)

    def _products(self, value: int, of: str) -> Iterator[Length]:
        several = {name: number for name, number in self._numbers.items() if number > 1 and value % number == 0}
        for one, other in combinations_with_replacement(several, 2):
            if several[one] * several[other] == value and self._shapes(one, of) and self._shapes(other, of):
                full = int(self.tree.numbers[one]) * int(self.tree.numbers[other])
                yield Length(f"{one} * {other}", value, full, likeness=1.0)


def counted_by(numbers: Iterable[tuple[str, object, object]]) -> Mapping[tuple[int, int], tuple[str, ...]]:
    """The values in the reduced model and in the model itself -> the attributes (name, value in each) with these values, if they are counts."""
    counts = (((one, other), name) for name, one, other in numbers if is_count(one) and is_count(other))
    return {pair: tuple(dict.fromkeys(names)) for pair, names in by_key(counts).items()}


def _likeness(words: str, attribute: str) -> float:
    return SequenceMatcher(None, words.replace("_", ""), attribute.replace("_", ""), autojunk=False).ratio()


def matrix_of(tree: ModuleTree, name: str) -> str:
    """The full name of the matrix of a product."""
    return name if name in tree.parameters else full_name(name, "weight")


def features(module: ModuleInfo, matrix: ParameterInfo, side: Features) -> int:
    """The number of input or output features of a module's matrix."""
    dim = feature_dim(module.kind, matrix.name, side, len(matrix.shape))
    assert dim is not None, (module.name, matrix.name, side)
    return matrix.shape[dim]


def output_features(tree: ModuleTree, pattern: str) -> int | None:
    """The number of output features of the matrix (a module's weight or a parameter) that a pattern names in a model's tree;
    None where the module computes the matrix (weight_norm)."""
    name = next(n for n in (*tree.modules, *tree.parameters) if tree.pattern(n) == pattern)
    if name in tree.parameters:
        return features(*tree.parameters[name], "out")
    weight = tree.modules[name].parameter("weight")
    return None if weight is None else features(tree.modules[name], weight, "out")
