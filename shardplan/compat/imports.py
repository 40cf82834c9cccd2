"""Classes by their import paths."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def import_class_from_path(name: str) -> Any:
    """The class (or anything else) at a dotted path, `torch.optim.AdamW`.

    Raises:
        ImportError: there is no such module, or it has nothing of that name.
        ValueError: a path without a dot.
    """
    module_name, dot, class_name = name.rpartition(".")
    if not dot or not module_name or not class_name:
        raise ValueError(f"{name!r} is not a dotted path: write the module and the class, `torch.optim.AdamW`")
    module = importlib.import_module(module_name)
    if not hasattr(module, class_name):
        raise ImportError(f"the module {module_name} has no {class_name}", name=module_name)
    return getattr(module, class_name)


def import_classes_from_paths(class_paths: Iterable[str]) -> list[Any]:
    """The classes at several paths. A class that cannot be imported is an error: without it, its modules would not be wrapped.

    Raises:
        ImportError, ValueError: as `import_class_from_path`.
    """
    return [import_class_from_path(path) for path in class_paths]
