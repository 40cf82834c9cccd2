"""Refuses linear layers that were converted to float8 after a plan was applied: they would take this rank's part of a weight for the
whole weight."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardplan.model.float8 import is_float8

from .watched import Looks, Watched


def no_later_float8(watched: Watched) -> Looks:
    """Raise RuntimeError where a layer was converted after the plan was applied."""
    known = {id(module) for module in watched.outer.modules() if is_float8(module)}

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name, layer in module.named_modules():
            if is_float8(layer) and id(layer) not in known and isinstance(layer.weight, DTensor):
                raise RuntimeError(
                    f"{name} was converted to float8 after apply_plan, which split its weight: convert the model first, then apply "
                    "the plan (convert_to_float8_training(model), then apply_plan(model, ...))"
                )

    return {watched.outer: look}
