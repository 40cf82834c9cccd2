"""A planned model that has no weights yet: its forward says which call gives it some."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def refuse_before_weights(model: nn.Module) -> None:
    """Make the forward of a model raise RuntimeError as long as a parameter is on the meta device, and that of its FSDP2 units.

    It is raised before FSDP2 looks at its parameters for the first time, so that the model can still be loaded. The hooks go
    with the first forward that has weights.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return

    def refuse(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the module that the graph belongs to was asked before
        if missing := next((name for name, parameter in module.named_parameters() if parameter.is_meta), None):
            raise RuntimeError(
                f"the model has no weights yet ({missing} is on the meta device): call materialize(model, device), or "
                "load_checkpoint(model, folder), before its first forward"
            )
        if module is model:
            for handle in handles:
                handle.remove()

    guarded = [model, *(m for m in model.modules() if isinstance(m, FSDPModule) and m is not model)]
    handles = [module.register_forward_pre_hook(refuse, prepend=True) for module in guarded]
