"""A model, or several that are parts of one: what a rank has of it."""

from __future__ import annotations

from torch import nn


class Parted:
    """The base of what has a model in parts.

    Attributes:
        parts: those of this rank; together with those of other ranks they are one model.
    """

    parts: list[nn.Module]


def parts_of(model: nn.Module | Parted) -> tuple[nn.Module, ...]:
    """The parts of this rank; a model is its own one part."""
    return tuple(model.parts) if isinstance(model, Parted) else (model,)
