"""The lengths of a packed matrix's parts, as expressions over the numbers of a configuration that hold for the reduced
model and for the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import combinations_with_replacement, islice, product

from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, is_count

from .channels import Part


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
        owners: modules whose code uses the numbers, from both trees.
        shapes: the parameter shapes of the reduced model with a number of its configuration changed; None where they are not known.
    """

    def __init__(
        self,
        reduced_tree: ModuleTree,
        tree: ModuleTree,
        owners: Sequence[tuple[ModuleInfo, ModuleInfo]],
        shapes: Callable[[str], Mapping[str, tuple[int, ...]] | None],
    ):
        self.reduced_tree, self.tree, self.owners, self.shapes = reduced_tree, tree, owners, shapes

    @cached_property
    def attributes(self) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """The values in the reduced model and in the model itself -> the attributes of the owners with these values."""
        found: dict[tuple[int, int], dict[str, None]] = {}
        for reduced, full in self.owners:
            for name, value in reduced.numbers.items():
                if is_count(value) and is_count(other := full.numbers.get(name)):
                    found.setdefault((value, other), {})[name] = None
        return {pair: tuple(names) for pair, names in found.items()}

    def parts(self, parts: Sequence[Part], size: int, of: str) -> Iterator[tuple[Sized, ...]]:
        """Expressions for the parts of a matrix, the most likely first.

        Args:
            size: their total length in the model itself.
            of: the full name of the matrix.
        """
        kinds = list(dict.fromkeys(parts))
        choices = [list(self._sized(part, of)) for part in kinds]
        found: list[tuple[float, tuple[Sized, ...]]] = []
        for chosen in islice(product(*choices), BOUNDS.expressions_together):
            named = dict(zip(kinds, chosen, strict=True))
            all_parts = tuple(named[part] for part in parts)
            if sum(one.full for one in all_parts) == size:
                found.append((sum(one.likeness for one in all_parts), all_parts))
        yield from (one for _, one in sorted(found, key=lambda item: -item[0]))

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
        if not self._numbers:
            single = [Length(str(value), value, value)]
        found = sorted(single, key=lambda one: -one.likeness)[: BOUNDS.expressions]
        return found or list(islice(self._products(value, of), BOUNDS.expressions))

    def _shapes(self, number: str, parameter: str) -> bool:
        """Whether the shape of a parameter depends on a number."""
        if number not in self._shaped:
            self._shaped[number] = self.shapes(number)
        changed = self._shaped[number]
        return changed is not None and changed.get(parameter) != self.reduced_tree.parameters[parameter][1].shape

    @cached_property
    def _shaped(self) -> dict[str, Mapping[str, tuple[int, ...]] | None]:
        return {}

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


def _likeness(words: str, attribute: str) -> float:
    return SequenceMatcher(None, words.replace("_", ""), attribute.replace("_", ""), autojunk=False).ratio()
