"""What no step may change: the names of modules and parameters, and which parameters are trained. Checked after each step that acts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardplan.core.tree import full_name


@dataclass(frozen=True)
class Names:
    """The names of a model at one moment, and which parameters require a gradient."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    trained: frozenset[str]


def names_of(model: nn.Module) -> Names:
    """The current names."""
    modules: list[tuple[str, nn.Module]] = []
    pending = [("", model)]
    while pending:  # named_modules() would take several times as long: its generators are nested
        name, module = pending.pop()
        modules.append((name, module))
        pending += [(full_name(name, leaf), child) for leaf, child in module._modules.items() if child is not None]
    parameters = [
        (full_name(name, leaf), p)
        for name, module in modules
        for leaf, p in module._parameters.items()
        if p is not None
    ]
    return Names(
        tuple(name for name, _ in modules),
        tuple(name for name, _ in parameters),
        frozenset(name for name, p in parameters if p.requires_grad),
    )


def check_unchanged(before: Names, model: nn.Module, step: str) -> None:
    """Assert that a step changed no name."""
    after = names_of(model)
    for what in ("modules", "parameters", "trained"):
        old, new = getattr(before, what), getattr(after, what)
        assert old == new, f"the step {step!r} changed {what}: {sorted(set(old) ^ set(new))[:5]}"
