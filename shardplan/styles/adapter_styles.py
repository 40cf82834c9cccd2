"""How each style stores the adapters of a layer; this follows from how it stores the layer's own weight.

An adapted layer computes y = W x + B A x (LoRA, arXiv 2106.09685), and its style's moves enclose both terms: x is in
the style's input destination, y is in its output source, and the move of y reduces both at once. In the types of
core/layout.py, where a result that is a slice or a partial sum needs R for its whole operands:

| the layer's weight | x | A | A x | B | W x and B A x |
|---|---|---|---|---|---|
| split by output features | R | R, whole | R | V, split by output features | V(-1) |
| split by input features | V(-1) | V, split by input features | P | R, whole | P |
| rows looked up by id, split | ids | P, whole: each rank reads 1/tp of it | P | R, whole | P |
| whole | as it comes | as the weight | | as the weight | |

So an adapter adds no collective of its own: R parameters have partial gradients, which are summed with the others of
their block. Where y is a slice of the features, a bias of B is added whole, split as they are; where y is a partial
sum, each rank adds 1/tp of the bias.
"""

from __future__ import annotations

from shardplan.core.tree import AdapterPart, ParameterInfo

from .style_record import WHOLE_PARTIAL, Features, ParameterStyle, Style

DIVIDED = ParameterStyle(None, "P")

# The dim of an adapter's parameter that holds the layer's output or input features.
DIMS: dict[AdapterPart, dict[Features, int]] = {
    "A": {"in": 1},
    "B": {"out": 0},
    "embedding_B": {"out": 0},
    "magnitude": {"out": 0},
}


def adapter_style(style: Style, parameter: ParameterInfo) -> ParameterStyle | None:
    """How a style stores a parameter of an adapter; None if no way is right."""
    weight, part = style.weight, parameter.adapter
    assert part is not None, parameter
    if weight.computed != "V":
        return ParameterStyle(None, weight.computed) if weight.computed in "IR" else None
    if weight.shard == "out":
        return {
            "A": WHOLE_PARTIAL,
            "B": weight,
            "embedding_A": WHOLE_PARTIAL,
            "embedding_B": weight,
            "magnitude": weight if "linear" in (style.kinds or ()) else None,
        }.get(part)
    if style.splits_rows:
        return {"embedding_A": DIVIDED, "embedding_B": WHOLE_PARTIAL}.get(part)
    # DoRA compares its magnitudes with the norm of each row of W + B A; a rank would have a part of the row.
    return {"A": weight, "B": DIVIDED if len(parameter.shape) == 1 else WHOLE_PARTIAL}.get(part)


def adapter_dim(parameter: ParameterInfo, features: Features) -> int:
    """The dim of an adapter's parameter that holds the given features."""
    assert parameter.adapter is not None, parameter
    return DIMS[parameter.adapter][features]
