"""The modules of a bound plan, in the form that the layout check takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.core.plan import ResolvedPlan
from shardplan.styles.bound import BoundModule, bound_modules
from shardplan.styles.boundary import Boundary


def boundaries(plan: ResolvedPlan) -> Mapping[str, BoundModule]:
    """Every module, by name, in the tree's order; without layouts where they have no effect."""
    return {
        name: replace(one, boundary=Boundary(outside=one.boundary.outside), tail=0) if _does_nothing(one) else one
        for name, one in bound_modules(plan).items()
    }


def _does_nothing(one: BoundModule) -> bool:
    """Whether a rule neither moves anything nor affects a gradient."""
    inputs, output = one.boundary.inputs, one.boundary.output
    moves = any(src != move.destination for move in inputs for src in move.sources) or (output and output.moves)
    shards = one.style is not None and one.style.shards_parameters
    return not moves and not shards and not any(p.requires_grad for p in one.module.parameters)


def is_mean(plan: Mapping[str, BoundModule], module: str, operation: str) -> bool:
    """Whether an operation in a module's own code is a mean that its style takes over the features of all ranks."""
    return operation == "mean" and plan[module].mean_ranks > 1


def outside_in(bound: BoundModule, names: Sequence[str]) -> tuple[int, ...]:
    """The results of a module that its rule says are read outside.

    Args:
        names: the names of the tensors that the module returned: their positions, if it returned a tuple.
    """
    return tuple(names.index(str(at)) for at in bound.boundary.outside if str(at) in names)
