"""The operations of a run that draw random numbers once a probability is above 0, and how their operands are spread."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shardplan.model.reduced.trace import Event, SourceLine, Trace

from .spread import Spread
from .spreads import Spreads
from .typed_run import TypedRun
from .types import KINDS, TypeKind

# Each drops single elements of its operand: a rank may drop those of its slice with numbers of its own.
ELEMENTWISE = frozenset(("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "scaled_dot_product_attention"))
# Each drops whole features; a slice may have a part of one.
WHOLE_FEATURES = frozenset(
    "dropout1d dropout2d dropout3d feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_".split()
)
OWN_CODE = "own code"  # in place of an operation: any value of the module's own code
LINEAR = frozenset(("dropout", "dropout_"))  # linear: the results for the parts of a sum add up to that of the sum


@dataclass(frozen=True, slots=True)
class DrawingOperand:
    """How the operand of an operation that may draw is spread.

    Args:
        module: the module whose code runs it.
        name: the operation's; "" for a layer with its adapters, whose operand is the layer's input; or `OWN_CODE`.
        source: the line of the model's code; None for a layer and for `OWN_CODE`.
        kind: how the operand is spread.
    """

    module: str
    name: str
    source: SourceLine | None
    kind: TypeKind


def drawing_operands(run: Trace, typed: TypedRun) -> tuple[DrawingOperand, ...]:
    """The drawing operands of a typed run, each once."""
    found: dict[DrawingOperand, None] = {}
    for event in (event for event in run.events if event.kind == "op"):
        if event.place[2] == "atom" and event.inputs:
            found[DrawingOperand(event.module, "", None, typed.type_of(event.inputs[0]).kind)] = None
        elif event.name in ELEMENTWISE | WHOLE_FEATURES:
            # The weights that attention drops are spread like its result: by heads, or by rows.
            kind = typed.type_of(event.outputs[0]).kind
            found[DrawingOperand(event.module, event.name, event.source, kind)] = None
    return tuple(found)


def own_values(run: Trace, typed: TypedRun, spreads: Spreads, modules: Collection[str]) -> Iterator[DrawingOperand]:
    """How the values in the modules' own code are spread: arguments, parameters, and results of operations and of
    called modules. Code that draws only under a condition that is false in this run can read nothing else."""
    for event, running in run.with_running():
        scope = event.module if event.kind in ("op", "read") else running[-1] if running else ""
        if scope not in modules or event.kind == "crash":
            continue
        sides = (
            ((event.inputs, True), (event.outputs, False))
            if event.kind in ("op", "read")
            else ((event.outputs, False),)
        )
        for numbers, inputs in sides:
            for position, number in enumerate(numbers):
                yield DrawingOperand(scope, OWN_CODE, None, _kind(event, position, number, typed, spreads, inputs))


def _kind(event: Event, position: int, number: int, typed: TypedRun, spreads: Spreads, inputs: bool) -> TypeKind:
    if number in typed.types:
        return typed.type_of(number).kind
    if event.kind == "read":
        return "whole"  # what matters is what an operation reads next
    spread = spreads.of(event, position, inputs=inputs)
    return KINDS[spread.kind] if isinstance(spread, Spread) else "?"
