"""Runs of a reduced model in which its routers hand out what they computed."""

from __future__ import annotations

from shardplan.compiler.layout import ModelLayouts, Workbench

AUXILIARY = "output_router_logits"  # the argument of transformers' models with experts


def benches_with_routers(layouts: ModelLayouts) -> tuple[Workbench, ...]:
    """The reduced model with each kind of input, and with the outputs of routers where the model can give them: an auxiliary
    loss reads them outside the blocks, and a plan is to be right with and without it."""
    benches = layouts.benches
    first = benches[0]
    if AUXILIARY not in vars(getattr(first.model, "config", None) or object):
        return benches
    try:
        return (*benches, Workbench(first.model, {**first.inputs, AUXILIARY: True}, first.tree))
    except Exception:  # the model's own: configured without experts, it has none to give, and raises for every caller
        return benches
