"""A plan on a small model: run it unsharded and as every rank, and type the runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardplan.core.layout import I, R
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.twin.trace import Trace, record

from .boundaries import boundaries
from .proof import Proof, Prover
from .ranks import run_rank
from .spread import Spread

ATOMS = ("linear", "conv1d", "embedding")  # one multiplication or look-up; what they do inside is one operation


@dataclass(frozen=True)
class Bench:
    """A small model, and its unsharded run.

    Args:
        model: with its weights.
        inputs: keyword arguments of its forward.
        reference: the run.
        atoms: the modules that are one operation.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    reference: Trace
    atoms: frozenset[str]


def make_bench(model: nn.Module, inputs: Mapping[str, Any], tree: ModuleTree) -> Bench:
    """Run the model unsharded."""
    atoms = frozenset(name for name, module in tree.modules.items() if module.kind in ATOMS)
    return Bench(model, inputs, record(model, inputs, atoms), atoms)


def prove(plan: ResolvedPlan, bench: Bench) -> Proof:
    """Run every rank of a plan that is free of structural errors, and type the runs.

    A gathered value whose readers decide on its gradient is tried both ways; the way with fewer findings holds.
    """
    bound = boundaries(plan)
    ranks = plan.sizes.tp
    runs = [
        run_rank(bench.model, bench.inputs, bench.atoms, bound, bench.reference, ranks, rank) for rank in range(ranks)
    ]
    spreads: dict[tuple[int, int], Spread | None] = {}
    open_ones = [name for name, boundary in bound.items() if boundary.open_gradient]
    best: Proof | None = None
    for layout in (R, I) if open_ones else (R,):
        gathers = dict.fromkeys(open_ones, layout)
        proof = Prover(bench.model, bound, bench.reference, runs, gathers, spreads).prove()
        if best is None or len(proof.findings) < len(best.findings):
            best = proof
        if not best.findings:
            break
    return best
