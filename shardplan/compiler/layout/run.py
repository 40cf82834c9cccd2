"""A plan on a reduced model: run it unsharded and as every rank, and type the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from shardplan.core.layout import I, Layout, R, V
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree
from shardplan.model.rebinding import copied
from shardplan.model.reduced.recorder import record
from shardplan.model.reduced.trace import Place
from shardplan.styles.boundary import returns_tokens

from .cross_module_reads import find_cross_module_reads
from .finding import Finding
from .mergeable_sums import seen_sums
from .provenance import Provenance
from .prover import typed_proof
from .randomness import DrawnAlike, acting_sites
from .rank_run import run_rank
from .read_results import find_read_results
from .reads import first_readers, same_arguments
from .spread import same
from .spreads import Spreads
from .typed_modules import boundaries
from .typing_result import Proof

# Modules of one multiplication or look-up: their inner operations, and those of their adapters, count as one.
ATOMS = ("linear", "conv1d", "embedding")
SEQUENCE = 1  # the dim of results [batch, sequence, ...] along which a rank of cp may return its own tokens


class RecordedModel:
    """A reduced model, run once unsharded.

    Args:
        model: the model with its weights; it is not changed.
        inputs: keyword arguments of its forward.
        tree: its module tree, to which plans are bound.
        experts: modules of experts that plans distribute. Each is one operation, as a rank there does not compute what
            the unsharded model does with the same rows.

    Attributes:
        random: the places of its code whose random numbers change its result.
        token_wise: (a call of experts, their number, the number of ranks) -> why the ranks cannot make the call
            together (see `token_findings`); all variants of a plan have the same calls.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], tree: ModuleTree, experts: frozenset[str] = frozenset()
    ):
        self.model, self.inputs, self.tree = model, inputs, tree
        kinds = ((name, module.kind) for name, module in tree.modules.items() if name not in tree.inside)
        self.atoms = frozenset(name for name, kind in kinds if kind in ATOMS) | experts
        # Copies: some models keep states of a run on their modules.
        self.reference = record(copied(model), inputs, self.atoms)
        self.random = acting_sites(model, inputs) if self.reference.drew else ()
        if self.random:
            with DrawnAlike():
                self.reference = record(copied(model), inputs, self.atoms)
        self.cross_module_reads = find_cross_module_reads(self.reference, tree.tied)
        self.same_arguments = same_arguments(model, self.reference)
        self.read_results = find_read_results(self.reference)
        self.token_wise: dict[tuple[Place, int, int], str] = {}
        self._decides: dict[int, bool] = {}

    def decides(self, place: int) -> bool:
        """Whether a number that the model's code asks for changes what the model returns: one of `Trace.answers` of its run."""
        if place not in self._decides:
            with DrawnAlike() if self.random else nullcontext():
                ways = (lambda x: 1e4 * abs(x) + 1, lambda x: -1e4 * abs(x) - 1)
                self._decides[place] = any(not self._returns_alike({place: way}) for way in ways)
        return self._decides[place]

    def _returns_alike(self, answers: Mapping[int, Callable[[float], float]]) -> bool:
        try:
            again = record(copied(self.model), self.inputs, self.atoms, answers)
        except Exception:  # from the model's code, of which the number is a part
            return False
        pairs = zip(again.results, self.reference.results, strict=False)
        return len(again.results) == len(self.reference.results) and all(same(a, b) for a, b in pairs)

    @cached_property
    def unlabelled(self) -> RecordedModel:
        """The same without labels; this one where the model's code cannot do without them."""
        inputs = {name: value for name, value in self.inputs.items() if name != "labels"}
        try:
            made = RecordedModel(self.model, inputs, self.tree, self.atoms)
        except Exception:  # from the model's code
            return self
        return made if made.reference.finite else self


def prove(
    plan: ResolvedPlan, recorded: RecordedModel, stop: Callable[[Finding], bool] = lambda finding: False
) -> Proof:
    """Run every rank of a plan that is free of structural errors, and type the runs.

    A gathered value whose readers decide on its gradient is tried both ways; the way with fewer findings wins.

    Args:
        plan: the plan.
        recorded: the reduced model.
        stop: whether nothing after a finding matters to the caller.
    """
    bound = boundaries(plan)
    ranks = plan.sizes.tp
    assert ranks is not None
    drawing = frozenset(site.module for site in recorded.random)
    run = partial(run_rank, recorded.model, recorded.inputs, recorded.atoms, bound, recorded.reference, ranks)
    with DrawnAlike() if drawing else nullcontext():
        runs = [run(rank) for rank in range(ranks)]
    owners = {name: module.name for name, (module, _) in plan.tree.parameters.items()}
    spreads, provenance = Spreads(bound, recorded.reference, runs), Provenance(runs[0], owners)
    unresolved = [
        name for name, one in bound.items() if one.boundary.output and one.boundary.output.unresolved_gradient
    ]
    parts: dict[Place, dict[int, bool]] = {}

    def typed(layout: Layout) -> Proof:
        gathers = dict.fromkeys(unresolved, layout)
        # Data parallelism adds up gradients over other axes.
        results = (I,) if plan.axis is Axis.TP else (R, V(SEQUENCE)) if returns_tokens(plan) else (R,)
        return typed_proof(
            recorded.model,
            bound,
            spreads,
            provenance,
            gathers,
            plan.fsdp_units,
            parts,
            stop,
            drawing,
            results,
            recorded.decides,
        )

    while True:
        best = typed(R)
        if best.findings and unresolved:
            best = min(best, typed(I), key=lambda proof: (proof.stopped, len(proof.findings)))
        if best.findings or not best.doubts:
            break
        # Nothing is wrong, except what a tolerance or a zero may hide: repeat the runs, with the doubtful operations
        # run on changed operands too.
        for place, positions in best.doubts.items():
            found = parts.setdefault(place, {})
            found.update(dict.fromkeys(positions, False))
        for rank in range(ranks):
            with DrawnAlike() if drawing else nullcontext():
                again = run(rank, best.doubts)
            for place, answers in again.parts.items():
                parts[place].update((position, True) for position, acts in answers.items() if acts)
    return replace(
        best,
        shared_reads=first_readers(plan.tree, runs[0], best.entering),
        declared=seen_sums(plan.tree, runs[0], best.reduced, plan.sums),
    )
