"""What no step may change, checked after each: the names of modules and parameters, and which are trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Names:
    """The names of a model at one moment, and which parameters require a gradient."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    trained: frozenset[str]


def names_of(model: nn.Module) -> Names:
    """The names as they are now."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    return Names(
        tuple(name for name, _ in model.named_modules()),
        tuple(name for name, _ in parameters),
        frozenset(name for name, p in parameters if p.requires_grad),
    )


def check_unchanged(before: Names, model: nn.Module, step: str) -> None:
    """Assert that a step changed no name."""
    after = names_of(model)
    for what in ("modules", "parameters", "trained"):
        old, new = getattr(before, what), getattr(after, what)
        assert old == new, f"the step {step!r} changed {what}: {sorted(set(old) ^ set(new))[:5]}"
