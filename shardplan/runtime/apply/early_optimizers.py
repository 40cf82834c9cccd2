"""The first step of a model's optimizers: optimizers made before a plan was applied hold parameters that the model no longer has."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardplan.core.first_few import in_a_row

from .model_parts import Parted, parts_of
from .unfit_optimizers import refuse_unfit

SHOWN = 3


class Originals:
    """A model's parameters before a plan is applied to it, by name. They are not kept alive."""

    def __init__(self, model: nn.Module):
        self.names = WeakTensorKeyDictionary({parameter: name for name, parameter in model.named_parameters()})

    def refuse_optimizers(self, model: nn.Module | Parted) -> None:
        """Make the first step of an optimizer raise ValueError before it changes anything, if the optimizer holds a replaced parameter or
        cannot step the new ones.

        torch calls the hook for the optimizers of all models; it lets optimizers without a parameter of this model pass. The hook is
        removed once optimizers of all trained parameters have stepped, or when the model is freed.

        Args:
            model: the same one, after the plan was applied.
        """
        for parameter in _parameters(model):
            self.names.pop(parameter, None)  # no weak reference may remain: torch does not move a tensor that has one
        if not self.names and not any(isinstance(p, DTensor) for p in _parameters(model)):
            return
        replaced, planned = self.names, weakref.ref(model)
        waiting = {id(p) for p in _parameters(model) if p.requires_grad}

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if dead := [replaced[p] for p in held if p in replaced]:
                raise ValueError(_message(dead, len(held)))
            if planned() is not None and not waiting.isdisjoint(own := set(map(id, held))):
                refuse_unfit(optimizer)
                waiting.difference_update(own)
            if planned() is None or not waiting:
                # torch iterates over its list of hooks here: they are removed after the step.
                optimizer.register_step_post_hook(lambda *_: handle.remove())

        handle = register_optimizer_step_pre_hook(check)


def _parameters(model: nn.Module | Parted) -> Iterator[nn.Parameter]:
    return (parameter for part in parts_of(model) for parameter in part.parameters())


def _message(dead: list[str], count: int) -> str:
    return (
        f"this optimizer was created before apply_plan, which replaced {len(dead)} of the {count} parameters that it holds "
        f"({in_a_row(dead, SHOWN)}): its steps would not train the model. Create the optimizer after apply_plan"
    )
