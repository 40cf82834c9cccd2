"""Walks over the events of a run, types all its values and finds where they do not fit.

`operations` types the results of operations, `crossings` the values at the boundary of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from torch import nn

from shardplan.core.layout import I, Layout
from shardplan.core.mesh import Axis
from shardplan.core.tree import full_name
from shardplan.model.reduced.trace import Place, Trace
from shardplan.styles.bound import BoundModule

from .crossings import Crossings
from .drawing_operands import drawing_operands, own_values
from .dropout import is_noisy
from .finding import Finding
from .mergeable_sums import shared_sums
from .operation_types import Operations
from .other_choices import Choice
from .provenance import Provenance
from .reads import shared_reads
from .spread import SUM, Spread
from .spreads import Spreads
from .typed_run import Stopped, TypedRun
from .types import Type, read_order
from .typing_result import Proof

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
        typed.made(number, bound.name)
        dim, kind = parameter.computed.dim, READ.get(parameter.computed.kind)
        if parameter.computed.axis is not Axis.TP:  # its module's input says which
            kind = READ["I"]
        elif isinstance(dim, int):
            info = bound.module.parameter(parameter.name)
            assert info is not None, name
            kind = Type("V", Spread("split", dim, read_order(parameter, info.shape[dim], ranks)))
        assert kind is not None, name
        typed.set_type(number, kind)


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
