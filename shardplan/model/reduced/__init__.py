"""Small copies of models for numeric proofs.

Importing this package imports neither torch nor transformers; using `make_twin` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .reduced_codes import CODES

if TYPE_CHECKING:
    from .reduced_model import Twin, make_twin

__all__ = ["CODES", "Twin", "make_twin"]


def __getattr__(name: str) -> Any:
    if name in ("Twin", "make_twin"):
        return getattr(import_module(f"{__name__}.reduced_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
