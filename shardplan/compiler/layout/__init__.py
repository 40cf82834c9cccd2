"""The layout check: a static proof that every activation and every gradient has the layout that its readers assume."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout_check import LayoutReport, check_layout
    from .model import ModelLayouts
    from .run import RecordedModel

__all__ = ["LayoutReport", "ModelLayouts", "RecordedModel", "check_layout"]

_HOMES = {
    "LayoutReport": "layout_check",
    "check_layout": "layout_check",
    "ModelLayouts": "model",
    "RecordedModel": "run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
