"""A plan on a small model: run it unsharded and as every rank, and type the runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardplan.core.layout import I, R
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.twin.recorder import record

from .boundaries import boundaries
from .elsewhere import read_elsewhere
from .origins import Origins
from .prover import Proof, Prover
from .ranks import run_rank
from .reads import first_readers
from .spreads import Spreads
from .sums import seen_sums

# One multiplication or look-up: what they do inside, with their adapters, is one operation.
ATOMS = ("linear", "conv1d", "embedding")


class Workbench:
    """A small model, run once unsharded.

    Args:
        model: with its weights; it is not changed.
        inputs: keyword arguments of its forward.
        tree: its picture, the one that plans are bound to.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], tree: ModuleTree):
        self.model, self.inputs, self.tree = model, inputs, tree
        kinds = ((name, module.kind) for name, module in tree.modules.items() if name not in tree.inside)
        self.atoms = frozenset(name for name, kind in kinds if kind in ATOMS)
        # A copy: some models keep states of a run on their modules.
        self.reference = record(copy.deepcopy(model), inputs, self.atoms)
        self.elsewhere = read_elsewhere(self.reference)


def prove(plan: ResolvedPlan, bench: Workbench) -> Proof:
    """Run every rank of a plan that is free of structural errors, and type the runs.

    A gathered value whose readers decide on its gradient is tried both ways; the way with fewer findings holds.
    """
    bound = boundaries(plan)
    ranks = plan.sizes.tp
    runs = [
        run_rank(bench.model, bench.inputs, bench.atoms, bound, bench.reference, ranks, rank) for rank in range(ranks)
    ]
    owners = {name: module.name for name, (module, _) in plan.tree.parameters.items()}
    spreads, origins = Spreads(bound, bench.reference, runs), Origins(runs[0], owners)
    open_ones = [name for name, boundary in bound.items() if boundary.open_gradient]
    best: Proof | None = None
    for layout in (R, I) if open_ones else (R,):
        gathers = dict.fromkeys(open_ones, layout)
        proof = Prover(bench.model, bound, spreads, origins, gathers, plan.fsdp_units).prove()
        if best is None or len(proof.findings) < len(best.findings):
            best = proof
        if not best.findings:
            break
    return replace(
        best,
        shared_reads=first_readers(plan.tree, runs[0], best.entering),
        declared=seen_sums(plan.tree, runs[0], best.reduced, plan.sums),
    )
