"""Linear layers that were made to compute in float8 after a plan was applied: refused, as they would meet this rank's part of a weight
as if it were a whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplan.model.float8 import is_float8

from .same_inputs import is_compared


def refuse_later_float8(model: nn.Module) -> None:
    """Make the forward of a planned model raise RuntimeError where a layer was converted after the plan was applied. It is looked for at
    the forwards 1, 2, 4, ..., 512 and every 1,000th."""
    known = {id(module) for module in model.modules() if is_float8(module)}
    count = 0

    def refuse(module: nn.Module, args: Any) -> None:
        nonlocal count
        if torch.compiler.is_compiling():
            return
        count += 1
        if not is_compared(count):
            return
        for name, layer in module.named_modules():
            if is_float8(layer) and id(layer) not in known and isinstance(layer.weight, DTensor):
                raise RuntimeError(
                    f"{name} was converted to float8 after apply_plan, which split its weight: convert the model first, then apply "
                    "the plan (convert_to_float8_training(model), then apply_plan(model, ...))"
                )

    model.register_forward_pre_hook(refuse, prepend=True)
