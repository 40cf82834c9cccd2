"""A planned model without weights: its forward raises, and names the call that gives it weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .watched import Looks, Watched


def weights_are_there(watched: Watched) -> Looks:
    """Raise RuntimeError at a forward of the model, or of one of its FSDP2 units, while a parameter is on the meta device.

    It is raised before FSDP2 first looks at its parameters, so the model can still be loaded.
    """
    model, ready = watched.outer, False
    if not any(parameter.is_meta for parameter in model.parameters()):
        return {}

    def look(module: nn.Module, args: Any, kwargs: Any) -> bool:
        nonlocal ready
        if ready:
            return True
        if missing := next((name for name, parameter in module.named_parameters() if parameter.is_meta), None):
            raise RuntimeError(
                f"the model has no weights yet ({missing} is on the meta device): call materialize(model, device), or "
                "load_checkpoint(model, folder), before its first forward"
            )
        ready = module is model
        return ready

    return dict.fromkeys([model, *(module for module in model.modules() if isinstance(module, FSDPModule))], look)
