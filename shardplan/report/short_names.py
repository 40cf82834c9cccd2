"""Folding names of repeated modules: `model.layers.0-31.mlp.down_proj`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names in the order of first appearance, with runs of numbers at one position written as ranges.

    A folded name represents exactly the names that it spells; it adds none.

    >>> fold_names(["layers.0.q", "layers.1.q", "layers.3.q", "norm"])
    ('layers.0-1,3.q', 'norm')
    """
    rows = [tuple(name.split(".")) for name in dict.fromkeys(names)]
    for position in reversed(range(max(map(len, rows), default=0))):
        rows = _fold_position(rows, position)
    return tuple(".".join(row) for row in rows)


def brace_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, where those that differ only in their last segment are written as one, like a glob in a plan.

    >>> brace_names(["layers.0-3.q", "layers.0-3.k", "norm"])
    ('layers.0-3.{q,k}', 'norm')
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        prefix, dot, last = name.rpartition(".")
        groups.setdefault(prefix + dot, []).append(last)
    return tuple(prefix + (last[0] if len(last) == 1 else f"{{{','.join(last)}}}") for prefix, last in groups.items())


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _fold_position(rows: list[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        if position < len(row) and row[position].isdecimal():
            key = (*row[:position], "", *row[position + 1 :])
            groups.setdefault(key, []).append(int(row[position]))
        else:
            groups[row] = []
    return [
        (*key[:position], ranges(sorted(numbers)), *key[position + 1 :]) if numbers else key
        for key, numbers in groups.items()
    ]
