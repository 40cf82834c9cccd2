"""Optimizers that were made before a plan was applied: they hold parameters that the model no longer has."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .model_parts import Parted, parts_of

SHOWN = 3


class Originals:
    """The parameters that a model has before a plan is applied to it, by name. They are not kept alive."""

    def __init__(self, model: nn.Module):
        self.names = WeakTensorKeyDictionary({parameter: name for name, parameter in model.named_parameters()})

    def refuse_optimizers(self, model: nn.Module | Parted) -> None:
        """Make the first step of an optimizer that holds a replaced parameter raise ValueError, before it changes anything.

        torch calls the hook for the optimizers of all models; those that hold no parameter of this one pass. The hook goes
        with the first step of an optimizer over the model's parameters, or once nobody holds a replaced one.

        Args:
            model: the same one, after the plan was applied.
        """
        for parameter in _parameters(model):
            self.names.pop(parameter, None)  # no weak reference may stay on it: torch moves such a tensor nowhere
        if not self.names:
            return
        replaced, planned = self.names, weakref.ref(model)

        def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if dead := [replaced[p] for p in held if p in replaced]:
                raise ValueError(_message(dead, len(held)))
            if not replaced or _trains(held, planned()):
                # torch is in the middle of its list of hooks here: they are removed after the step.
                optimizer.register_step_post_hook(lambda *_: handle.remove())

        handle = register_optimizer_step_pre_hook(check)


def _parameters(model: nn.Module | Parted) -> Iterator[nn.Parameter]:
    return (parameter for part in parts_of(model) for parameter in part.parameters())


def _trains(held: list[Tensor], model: nn.Module | Parted | None) -> bool:
    """Whether any of these tensors is a parameter of the model."""
    parameters = {id(p) for p in _parameters(model)} if model is not None else set()
    return any(id(p) in parameters for p in held)


def _message(dead: list[str], count: int) -> str:
    names = ", ".join(dead[:SHOWN]) + (f" and {len(dead) - SHOWN} more" if len(dead) > SHOWN else "")
    return (
        f"this optimizer was created before apply_plan, which replaced {len(dead)} of the {count} parameters that it holds "
        f"({names}): its steps would not train the model. Create the optimizer after apply_plan"
    )
