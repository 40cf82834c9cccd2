"""Runs of a reduced model in which its routers return what they compute."""

from __future__ import annotations

from shardplan.compiler.layout import ModelLayouts, RecordedModel
from shardplan.model.config_numbers import config_value

AUXILIARY = "output_router_logits"  # the argument of transformers' models with experts


def recorded_with_routers(layouts: ModelLayouts) -> tuple[RecordedModel, ...]:
    """The reduced model with each kind of input, and again with the routers' outputs where the model can return them. An auxiliary
    loss reads these outside the blocks, and a plan must be right with and without it."""
    recorded_models = layouts.recorded_models
    first = recorded_models[0]
    if config_value(getattr(first.model, "config", None), AUXILIARY) is None:
        return recorded_models
    try:
        return (*recorded_models, RecordedModel(first.model, {**first.inputs, AUXILIARY: True}, first.tree))
    except Exception:  # the model's own: without experts it has no such outputs, and raises for every caller
        return recorded_models
