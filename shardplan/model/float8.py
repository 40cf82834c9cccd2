"""torchao's linear layers that compute in float8. They keep the parameters, names and layouts of the ordinary layers that
they replace, so plans are checked and proven with ordinary layers."""

from __future__ import annotations

from typing import Any

from torch import nn

_LIBRARY = "torchao.float8"
_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta")))


def is_float8(module: nn.Module) -> bool:
    """Whether a module is a linear layer that computes in float8."""
    return isinstance(module, nn.Linear) and any(base.__module__.startswith(_LIBRARY) for base in type(module).__mro__)


def has_weight_casts(module: nn.Module) -> bool:
    """Whether a layer's weight is torchao's tensor, which FSDP2 gathers in float8."""
    return is_float8(module) and type(module.weight.data).__module__.startswith(_LIBRARY)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """A module's class; for one that computes in float8, the class of the ordinary linear layer."""
    return nn.Linear if is_float8(module) else type(module)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes without those for computing in float8."""
    attributes = vars(module)
    return {key: attributes[key] for key in attributes if key in _PLAIN} if is_float8(module) else attributes


def without_float8(model: nn.Module) -> nn.Module:
    """Make the linear layers of a model compute in their own dtype, in place."""
    for module in model.modules():
        if is_float8(module):
            kept = plain_attributes(module)
            module.__class__ = nn.Linear
            module.__dict__.clear()
            module.__dict__.update(kept)
    return model
