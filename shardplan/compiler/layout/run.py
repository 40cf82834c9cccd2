"""A plan on a reduced model: run it unsharded and as every rank, and type the runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.core.layout import I, Layout, R, V
from shardplan.core.mesh import Axis
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree, full_name
from shardplan.model.rebinding import copied
from shardplan.model.reduced.model_inputs import can_be_padded, padded
from shardplan.model.reduced.recorder import record
from shardplan.model.reduced.trace import Place, Trace
from shardplan.styles.bound import BoundModule
from shardplan.styles.boundary import returns_tokens

from .cross_module_reads import find_cross_module_reads, find_read_results
from .crossings import Crossings
from .drawing_operands import DrawingOperand, drawing_operands, own_values
from .dropout import is_noisy
from .finding import Finding
from .mergeable_sums import SeenSum, SharedSum, seen_sums, shared_sums
from .operation_types import Operations
from .other_choices import Choice, other_choices, other_constants
from .randomness import DrawnAlike, acting_sites
from .rank_run import run_rank
from .reads import SharedRead, first_readers, same_arguments, shared_reads
from .spread import SUM, Spread, same
from .spreads import Spreads
from .typed_modules import boundaries
from .typed_run import Provenance, Stopped, TypedRun
from .types import Type, read_order

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
        self._decides: dict[tuple[int, Place | None], bool] = {}

    def decides(self, asked: int, at: Place | None) -> bool:
        """Whether a number or a condition that the model's code asks for changes what the model returns.

        Args:
            asked: one of `Trace.answers` of its run.
            at: the operation that made it of booleans or integers. Where there are none (a mask without elements) and the model returns the same
                with either answer, the condition saves time alone, and each rank may have its own.
        """
        if (asked, at) not in self._decides:
            self._decides[asked, at] = self._depends(asked) and (at is None or not self._only_saves_time(asked, at))
        return self._decides[asked, at]

    def _depends(self, asked: int) -> bool:
        conditions: list[bool] = []

        def other(factor: float, answer: Any) -> Any:
            condition = isinstance(answer, bool) or (isinstance(answer, Tensor) and answer.dtype == torch.bool)
            conditions.append(condition)
            if condition:
                return not answer if isinstance(answer, bool) else ~answer
            return factor * abs(answer) + (1 if factor > 0 else -1)

        found = [self.again({asked: partial(other, factor)}) for factor in (1e4, -1e4)]
        # The other way of a condition may be one to raise: then no rank goes on alone.
        return any(not (made is None and any(conditions)) and not _alike(made, self.reference) for made in found)

    def _only_saves_time(self, asked: int, at: Place) -> bool:
        with_, without = (self.again({asked: answer}, {at}) for answer in (lambda x: True, lambda x: False))
        return without is not None and _alike(with_, without)

    def again(
        self,
        answers: Mapping[int, Callable[[Any], Any]] = MappingProxyType({}),
        emptied: Collection[Place] = (),
        planted: Mapping[Place, Tensor] = MappingProxyType({}),
    ) -> Trace | None:
        """The unsharded run with other answers, or with other masks and indices (see `other_choices`); None where the model's code
        raises, of which they are a part. The arguments are those of `record`."""
        try:
            with DrawnAlike() if self.random else nullcontext():
                return record(copied(self.model), self.inputs, self.atoms, answers, emptied, planted)
        except Exception:
            return None

    @cached_property
    def unlabelled(self) -> RecordedModel:
        """The same without labels; this one where the model's code cannot do without them."""
        inputs = {name: value for name, value in self.inputs.items() if name != "labels"}
        return self._with(inputs) or self

    @cached_property
    def with_padding(self) -> RecordedModel | None:
        """The same with padding in a row; None where the call has no ids that can be padded, or the model's code does not run with them."""
        if not can_be_padded(self.model, self.inputs):
            return None
        return self._with(padded(self.inputs, row=0, side="right"))

    def _with(self, inputs: Mapping[str, Any]) -> RecordedModel | None:
        try:
            made = RecordedModel(self.model, inputs, self.tree, self.atoms)
        except Exception:  # from the model's code
            return None
        return made if made.reference.finite else None


def _alike(one: Trace | None, other: Trace) -> bool:
    """Whether the model returns the same in both runs."""
    results = None if one is None else one.results
    return results is not None and len(results) == len(other.results) and all(map(same, results, other.results))


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
    return _prove(plan, recorded, recorded.reference, stop)


def _is_known(finding: Finding) -> bool:
    """Whether a finding says what is wrong, and not that nothing is known."""
    return finding.kind != "untyped"


def _misses_all(run: Trace) -> bool:
    """Whether an operation raises that reads a tensor without elements."""
    return run.crash is not None and not all(run.values[number].numel() for number in run.crash.inputs)


def _moves(run: Trace) -> list[Place]:
    """Where modules' arguments and results move."""
    return [event.place for event in run.events if event.moved]


def _prove(
    plan: ResolvedPlan,
    recorded: RecordedModel,
    reference: Trace,
    stop: Callable[[Finding], bool],
    planted: Sequence[Mapping[Place, Tensor]] = (),
    usual: Sequence[Trace] = (),
) -> Proof:
    """As `prove`.

    Args:
        reference: the unsharded run.
        planted: for each rank, the masks and indices that are others than the model's; () where none are.
        usual: then the runs where they are the model's, the unsharded one first.
    """
    bound = boundaries(plan)
    ranks = plan.sizes.tp
    assert ranks is not None
    drawing = frozenset(site.module for site in recorded.random)

    def run(rank: int, probes: Mapping[Place, Iterable[int]] = MappingProxyType({})) -> Trace:
        given = planted[rank] if planted else MappingProxyType({})
        with DrawnAlike() if drawing else nullcontext():
            return run_rank(
                recorded.model, recorded.inputs, recorded.atoms, bound, reference, ranks, rank, probes, given
            )

    runs = [run(rank) for rank in range(ranks)]
    if planted and any(map(_misses_all, runs)):  # a rank without chosen values says so when it trains
        return Proof((), {}, (), (), 0)
    if planted and any(_moves(one) != _moves(runs[0]) for one in runs):  # they wait for each other
        return Proof((Finding("crash", "", ""),), {}, (), (), 0)
    owners = {name: module.name for name, (module, _) in plan.tree.parameters.items()}
    spreads, provenance = Spreads(bound, reference, runs, usual), Provenance(runs[0], owners)
    unresolved = [
        name for name, one in bound.items() if one.boundary.output and one.boundary.output.unresolved_gradient
    ]
    parts: dict[Place, dict[int, bool]] = {}

    def found_in(way: Sequence[Mapping[Place, Tensor]], *, finite: bool = False) -> Sequence[Finding]:
        whole, *own = way
        other = recorded.again(planted=whole)
        if other is None or (finite and not other.finite):
            return ()
        return _prove(plan, recorded, other, _is_known, own, (recorded.reference, *runs)).findings

    def typed(layout: Layout, wrong: Sequence[Choice] = ()) -> Proof:
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
            (lambda asked, at: False) if planted else recorded.decides,
            wrong,
            own_tokens=bool(plan.overlays - {"expert_parallel"}),
        )

    while True:
        layout, best = R, typed(R)
        if best.findings and unresolved:
            ways = ((way, best if way is R else typed(way)) for way in (R, I))
            layout, best = min(ways, key=lambda way: (way[1].stopped, len(way[1].findings)))
        if best.findings or not best.doubts:
            break
        # Nothing is wrong, except what a tolerance or a zero may hide: repeat the runs, with the doubtful operations
        # run on changed operands too.
        for place, positions in best.doubts.items():
            found = parts.setdefault(place, {})
            found.update(dict.fromkeys(positions, False))
        for rank in range(ranks):
            for place, answers in run(rank, best.doubts).parts.items():
                parts[place].update((position, True) for position, acts in answers.items() if acts)
    if planted and spreads.returned():  # what could not be compared inside made no difference
        best = replace(best, findings=tuple(filter(_is_known, best.findings)))
    if not planted and not best.findings:
        wrong = [choice for choice in other_choices(spreads) if any(map(found_in, choice.ways))]
        best = typed(layout, wrong) if wrong else best
        for line, way in other_constants(spreads) if not best.findings else ():
            if others := found_in(way, finite=True):
                best = replace(best, findings=tuple(replace(one, mask=line) for one in others))
                break
    return replace(
        best,
        shared_reads=first_readers(plan.tree, runs[0], best.entering),
        declared=seen_sums(plan.tree, runs[0], best.reduced, plan.sums),
    )


# Walks over the events of a run, types all its values and finds where they do not fit.
#
# `operations` types the results of operations, `crossings` the values at the boundary of a module.

# The type of a parameter that every rank reads whole, or as a part of a sum.
READ = {"I": Type("I"), "R": Type("R"), "P": Type("P", SUM)}


def typed_proof(
    model: nn.Module,
    plan: Mapping[str, BoundModule],
    spreads: Spreads,
    provenance: Provenance,
    gathers: Mapping[str, Layout],
    units: Sequence[str] = (),
    parts: Mapping[Place, Mapping[int, bool]] = MappingProxyType({}),
    stop: Callable[[Finding], bool] = lambda finding: False,
    drawing: Collection[str] = (),
    results: Sequence[Layout] = (I,),
    decides: Callable[[int, Place | None], bool] = lambda asked, at: False,
    wrong: Sequence[Choice] = (),
    own_tokens: bool = False,
) -> Proof:
    """Type one run.

    Args:
        model: the unsharded model.
        plan: each module and its boundary.
        spreads: how values are spread, from the run of every rank.
        provenance: where the values of the first rank's run come from.
        gathers: the output layouts of modules whose gradient is unresolved; R by default.
        units: modules whose parameters are gathered only while they run themselves.
        parts: operation -> operand -> whether it contributes to the result, where that is typed.
        stop: whether nothing after a finding matters.
        drawing: modules whose own code draws random numbers.
        results: as for `Crossings`.
        decides: as for `Operations.asked`.
        wrong: the choices that make the run wrong where they are others.
        own_tokens: as for `Operations`.
    """
    typed, run = TypedRun(provenance, stop), provenance.run
    operations = Operations(typed, plan, spreads, units, parts, own_tokens)
    crossings = Crossings(typed, operations, model, plan, spreads, gathers, results)
    try:
        _type_parameters(typed, plan, len(spreads.runs))
        _walk(typed, operations, crossings, spreads.runs)
        operations.asked(decides)
        operations.choose(wrong)
    except Stopped:
        return Proof(tuple(typed.findings), crossings.incoming, (), (), typed.operations, stopped=True)
    taken = (name for name, one in plan.items() if one.boundary.inputs or one.boundary.output is not None)
    having = {name for name, one in plan.items() if is_noisy(one.module.kind, one.module.numbers)} | set(drawing)
    own = dict.fromkeys(own_values(run, typed, spreads, having)) if having else ()
    return Proof(
        tuple(typed.findings),
        crossings.incoming,
        shared_reads(run, crossings.entering, taken),
        shared_sums(run, crossings.reduced),
        typed.operations,
        entering=tuple(crossings.entering),
        reduced=tuple(crossings.reduced),
        doubts=operations.doubts,
        operands=(*drawing_operands(run, typed), *own),
    )


def _type_parameters(typed: TypedRun, plan: Mapping[str, BoundModule], ranks: int) -> None:
    owned = {full_name(bound.name, p.name): (bound, p) for bound in plan.values() for p in bound.parameters}
    for number, name in typed.run.parameters.items():
        bound, parameter = owned[name]
        typed.makers[number] = bound.name
        dim, kind = parameter.computed.dim, READ.get(parameter.computed.kind)
        if parameter.computed.axis is not Axis.TP:  # its module's input says which
            kind = READ["I"]
        elif isinstance(dim, int):
            info = bound.module.parameter(parameter.name)
            assert info is not None, name
            kind = Type("V", Spread("split", dim, read_order(parameter, info.shape[dim], ranks)))
        assert kind is not None, name
        typed.types[number] = kind


def _walk(typed: TypedRun, operations: Operations, crossings: Crossings, runs: Sequence[Trace]) -> None:
    first, *others = runs
    for event in first.events:
        match event.kind:
            case "op":
                operations.op(event)
            case "read":
                operations.read(event)
            case "enter":
                crossings.enter(event)
            case "leave":
                crossings.leave(event)
            case "crash":
                typed.find("crash", event, event.module, event.inputs, message=event.message)
    for crash in (run.crash for run in others if first.crash is None):
        if crash is not None:  # the numbers of its values belong to another rank
            typed.find("crash", crash, crash.module, (), message=crash.message)


# The result of typing a run.
@dataclass(frozen=True)
class Proof:
    """The results.

    Args:
        findings: the findings, in the order of the run.
        incoming: the layout that reaches each module that takes I and R; if it gathers its output, the output's.
        reads: values that several modules each move I -> R.
        sums: partial sums that are reduced one by one and then added to each other.
        operations: how many operations were typed.
        doubts: operation -> the operands that must not contribute if its result is what it seems; it is unknown
            whether they do.
        operands: how the operand of each operation that may draw random numbers, and of each layer with adapters, is spread.
        stopped: whether typing ended at the last of the findings; what comes after it was not looked at.
        entering: (value, module) for each I that a module moves to R.
        reduced: (value, module) for each partial sum that a module reduces at its output.
        shared_reads: module that moves I -> R -> the module that moved the same tensor before it, in every call of
            their block; None for a module that did not always find it moved.
        declared: what the run showed of each of the plan's `sum_outputs`.
    """

    findings: tuple[Finding, ...]
    incoming: Mapping[str, Layout]
    reads: tuple[SharedRead, ...]
    sums: tuple[SharedSum, ...]
    operations: int
    entering: tuple[tuple[int, str], ...] = ()
    reduced: tuple[tuple[int, str], ...] = ()
    shared_reads: Mapping[str, str | None] = field(default_factory=dict)
    declared: tuple[SeenSum, ...] = ()
    doubts: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)
    operands: tuple[DrawingOperand, ...] = ()
    stopped: bool = False
