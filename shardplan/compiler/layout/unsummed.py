"""Diagnostics for wrongly declared sums."""

from __future__ import annotations

from collections.abc import Iterable

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.sum_outputs import SummedOutputs
from shardplan.core.tree import ModuleTree, starred

from .mergeable_sums import SeenSum

UNSUMMED = Code("SP412")


def undeclared(seen: Iterable[SeenSum]) -> tuple[Diagnostic, ...]:
    """One diagnostic for each rule and reason, with the modules of all blocks."""
    wrong = (one for one in seen if one.wrong and not one.sum.rule.optional)
    found = by_key(((one.sum.rule.location, f"{starred(one.module)} {one.wrong}"), one) for one in wrong)
    return tuple(
        _diagnostic(alike[0].sum, words, tuple(one.module for one in alike)) for (_, words), alike in found.items()
    )


def holding(seen: Iterable[SeenSum]) -> frozenset[Location]:
    """The places of the rules whose sums hold in every run."""
    seen = tuple(seen)
    wrong = {one.sum.rule.location for one in seen if one.wrong}
    return frozenset(one.sum.rule.location for one in seen) - wrong


def acting(tree: ModuleTree, name: str) -> tuple[str, ...]:
    """The dropouts of the model that a reduced model's dropout represents, where they drop something."""
    pattern = tree.pattern(name)
    return tuple(n for n, m in tree.modules.items() if tree.pattern(n) == pattern and m.numbers.get("p"))


def dropping(tree: ModuleTree, through: Iterable[tuple[SummedOutputs, str]]) -> tuple[Diagnostic, ...]:
    """Diagnostics for sums whose parts pass a dropout that acts in the model itself and is switched off in the reduced
    model: a waiting part is not dropped.

    Args:
        tree: the model's own.
        through: (sum, dropout), as the reduced model has them.
    """
    found: dict[object, Diagnostic] = {}
    for one, name in through:
        names = () if one.rule.optional else acting(tree, name)
        if names:
            message = f"{starred(name)} drops elements (p={tree.modules[names[0]].numbers['p']:g}) of the summands"
            found.setdefault((one.rule.location, tree.pattern(name)), _diagnostic(one, message, names))
    return tuple(found.values())


def _diagnostic(one: SummedOutputs, message: str, modules: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code=UNSUMMED,
        severity=Severity.ERROR,
        message=f"the outputs in `sum_outputs` are not only added up: {message}",
        primary=Label(one.rule.location, "declares their sum"),
        help=f"delete `{one.rule.text}`: each output is then reduced by itself",
        modules=modules,
    )
