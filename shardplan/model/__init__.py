"""The model that the user named, on the meta device, and its ModuleTree.

Importing this package imports neither torch nor transformers; using the names below does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .auto import choose_plan, no_plan
from .model_words import classify
from .settings import parse_setting

if TYPE_CHECKING:
    from .build_tree import tree_of
    from .find_anything import find_any
    from .found import FoundModel, find_model, found_from_config, tree_of_config
    from .hf import hf_tp_plan

LAZY = {
    "find_any": "find_anything",
    "FoundModel": "found",
    "find_model": "found",
    "found_from_config": "found",
    "tree_of_config": "found",
    "tree_of": "build_tree",
    "hf_tp_plan": "hf",
}

__all__ = [
    "FoundModel",
    "choose_plan",
    "classify",
    "find_any",
    "find_model",
    "found_from_config",
    "hf_tp_plan",
    "no_plan",
    "parse_setting",
    "tree_of",
    "tree_of_config",
]


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
