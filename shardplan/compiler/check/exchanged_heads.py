"""Where heads are exchanged over cp, the ranks of both axes together divide what the rules for tp below split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Assignment, ResolvedPlan
from shardplan.core.tree import ancestors
from shardplan.styles import STYLES

from .check_words import join, listed
from .facts import Facts
from .requirements import LARGEST_LISTED, Requirement

HEADS = Code("SP369")


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each rule `exchange_heads`, except what `compiler/check/divisibility.py` reports for tp alone."""
    on_cp, tp = facts.resolved.on_cp, facts.tp
    if on_cp is None or tp is None:
        return
    cp = facts.resolved.sizes.cp
    misfits = (one for one in facts.shared_with_cp if one.allows(tp) and not one.allows(tp * cp))
    for rule, requirements in by_key((_mixer(facts, one).rule, one) for one in misfits).items():
        pattern = rule.pattern
        ranks = f"cp {cp} x tp {tp} = {tp * cp} ranks" if tp > 1 else f"{cp} ranks of cp"
        counts = join(dict.fromkeys(f"{one.what} is {one.count}" for one in requirements), "and")
        fitting = tuple(size for size in range(2, LARGEST_LISTED // tp) if facts.exchanges(tp, size))
        others = f", or use cp {listed(fitting)}" if fitting else ""
        yield Diagnostic(
            code=HEADS,
            severity=Severity.ERROR,
            message=f"`{pattern}` cannot exchange its heads over {ranks}: {counts}",
            primary=Label(rule.location, "gives each rank an equal share"),
            related=tuple(
                {id(one.rule): Label(one.rule.location, "says what is split") for one in requirements}.values()
            ),
            help=f"write `{pattern}: replicate_seq`{others}",
            modules=tuple(dict.fromkeys(name for one in requirements for name in one.modules)),
        )


def heads_shared_over_cp(resolved: Iterable[ResolvedPlan], sizes: MeshSizes, *, exact: bool) -> dict[int, int]:
    """Number of key-value heads in the model, if several ranks of cp share each -> their number on a rank of tp in a
    reduced model: one if it has one in the model, else the fewest that keep different numbers apart.

    Args:
        resolved: variants of a plan, bound to the model.
        sizes: the sizes of the mesh, with one of tp.
        exact: as many as in the model, for a model that is not made smaller or for all ranks of the mesh.
    """
    tp = sizes.tp or 1
    shared = (one for plan in resolved for one in Facts(plan).shared_with_cp if one.shares)
    counts = {one.count: one.count // tp for one in shared if one.count % tp == 0 and one.count < tp * sizes.cp}
    fewest = {each: 2**i for i, each in enumerate(sorted({1, *counts.values()}))}
    return counts if exact else {count: fewest[each] for count, each in counts.items()}


def exchanges_heads(resolved: ResolvedPlan) -> bool:
    """Whether a plan exchanges heads over cp."""
    rules = () if resolved.on_cp is None else resolved.on_cp.modules.values()
    return any(STYLES[one.rule.style].exchanges_heads for one in rules)


def _mixer(facts: Facts, one: Requirement) -> Assignment:
    """The module around a requirement's modules that exchanges the heads."""
    assert facts.resolved.on_cp is not None
    modules = facts.resolved.on_cp.modules
    around = (one.modules[0], *ancestors(one.modules[0]))
    return next(
        modules[name] for name in around if name in modules and STYLES[modules[name].rule.style].exchanges_heads
    )
