"""Reduced models for numeric proofs.

Importing this package imports neither torch nor transformers; using `make_reduced_model` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reduced_model import ReducedModel, make_reduced_model

__all__ = ["ReducedModel", "make_reduced_model"]


def __getattr__(name: str) -> Any:
    if name in ("ReducedModel", "make_reduced_model"):
        return getattr(import_module(f"{__name__}.reduced_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
