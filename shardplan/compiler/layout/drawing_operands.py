"""The operations of a run that draw random numbers as soon as a probability is above 0, and how their operands are spread."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.model.reduced.trace import SourceLine, Trace

from .types import TypeKind
from .typing_state import Known

# Each drops elements of what it reads alone: the elements of a slice may be dropped with numbers of its rank's own.
ELEMENTWISE = frozenset(("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "scaled_dot_product_attention"))
# Each drops whole features, which a slice may have a part of.
WHOLE_FEATURES = frozenset(
    "dropout1d dropout2d dropout3d feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_".split()
)
LINEAR = frozenset(("dropout", "dropout_"))  # of a sum they are the sum of what they are of its parts


@dataclass(frozen=True, slots=True)
class DrawingOperand:
    """How the operand of an operation that may draw is spread.

    Args:
        module: the module whose code runs it.
        name: of the operation; "" for a layer with its adapters, whose operand is the layer's input.
        source: the line of the model's code; None for a layer.
        kind: of the operand.
    """

    module: str
    name: str
    source: SourceLine | None
    kind: TypeKind


def drawing_operands(run: Trace, known: Known) -> tuple[DrawingOperand, ...]:
    """Those of a run that was typed, each once."""
    found: dict[DrawingOperand, None] = {}
    for event in run.events:
        if event.kind != "op":
            continue
        if event.place[2] == "atom" and event.inputs:
            found[DrawingOperand(event.module, "", None, known.type_of(event.inputs[0]).kind)] = None
        elif event.name in ELEMENTWISE | WHOLE_FEATURES:
            # The weights that attention drops are spread as its result is: by heads, or by rows.
            kind = known.type_of(event.outputs[0]).kind
            found[DrawingOperand(event.module, event.name, event.source, kind)] = None
    return tuple(found)
