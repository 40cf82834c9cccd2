"""Folding names of repeated modules: `model.layers.0-31.mlp.down_proj`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardplan.core.folded_names import brace, folded, in_last


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names in the order of first appearance, with runs of numbers at one position written as ranges.

    A folded name represents exactly the names that it spells; it adds none.

    >>> fold_names(["layers.0.q", "layers.1.q", "layers.3.q", "norm"])
    ('layers.0-1,3.q', 'norm')
    """
    return tuple(folded(names, lambda row, at: row[at].isdecimal(), lambda found: ranges(sorted(map(int, found)))))


def brace_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, where those that differ only in their last segment are written as one, like a glob in a plan.

    >>> brace_names(["layers.0-3.q", "layers.0-3.k", "norm"])
    ('layers.0-3.{q,k}', 'norm')
    """
    return tuple(folded(names, in_last, brace))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
