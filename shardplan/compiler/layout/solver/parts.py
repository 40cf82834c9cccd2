"""Packed matrices: expressions for the lengths of their parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, ParameterInfo
from shardplan.styles import feature_dim
from shardplan.styles.style_record import Features

COEFFICIENTS = (1, 2, 3, 4)
# The words for a length, the most likely first; all other numbers of the configuration come after them.
KNOWN = (
    ("num_attention_heads", "head_dim"),
    ("num_key_value_heads", "head_dim"),
    ("hidden_size",),
    ("intermediate_size",),
)


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


def packed(
    lengths: tuple[int, ...], reduced_tree: ModuleTree, tree: ModuleTree, size: int | None
) -> int | list[str] | None:
    """The parts in a rule's words: a number of equal parts, or an expression for each part. None where nothing holds for both
    the reduced model and the model itself.

    Args:
        lengths: the lengths in the reduced model.
        reduced_tree: the reduced model's tree.
        tree: the tree of the model itself.
        size: the total length in the model itself; None where it is unknown, so that only equal parts can be found.
    """
    if len(set(lengths)) == 1:
        return len(lengths)
    if len(lengths) > BOUNDS.parts or size is None:
        return None
    if not tree.numbers and sum(lengths) == size:
        return list(map(str, lengths))  # a model without configuration is its own reduced model
    choices = [list(_expressions(length, reduced_tree)) for length in lengths]
    for chosen in product(*choices):
        if sum(_value(words, tree) for words in chosen) == size:
            return [" * ".join(map(str, words)) for words in chosen]
    return None


Words = tuple[int | str, ...]


def _expressions(length: int, tree: ModuleTree) -> Iterator[Words]:
    numbers = {n: v for n, v in tree.numbers.items() if type(v) is int and v > 1 and "." not in n}
    words = [*KNOWN, *((n,) for n in numbers), *combinations_with_replacement(numbers, 2)]
    seen = 0
    for factor in COEFFICIENTS:
        for names in words:
            if all(name in numbers for name in names):
                given: Words = names if factor == 1 else (factor, *names)
                if _value(given, tree) == length:
                    yield given
                    seen += 1
                    if seen == BOUNDS.expressions:
                        return


def _value(words: Words, tree: ModuleTree) -> int:
    result = 1
    for word in words:
        result *= word if isinstance(word, int) else int(tree.numbers.get(word, 0))
    return result
