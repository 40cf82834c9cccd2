"""What makes compiling cheaper in tests. Half of what process tests took was layout checks of the same few small models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplan.api.deciding import Asked
from shardplan.compiler.layout import model
from shardplan.proof.fingerprints import Fingerprint, NotStable

Compiled = Callable[..., Any]
_KNOWN: dict[str, Any] = {}
EACH_TIME = Asked.compiled


def look_for_no_repairs(patch: pytest.MonkeyPatch) -> None:
    """Findings come without the changes that fix them: each that is tried costs a run of all ranks."""
    patch.setattr(model, "Search", partial(model.Search, tries=0))


def compile_once(put: Callable[[type, str, Compiled], None] = setattr) -> None:
    """Let `apply_plan` and `compile_plan` have what they compiled in this process for an equal model, plan and mesh before. Equal is what
    the proof calls so (`Fingerprint`). Files of plans, and plans that all ranks derive together, are compiled each time. Not for tests that
    change the compiler.

    Args:
        put: sets an attribute.
    """

    def once(asked: Asked, sizes: Any, *args: Any, **options: Any) -> Any:
        plan = asked.plan
        try:
            key = _digest(torch.get_default_dtype(), sizes, *(getattr(asked, field.name) for field in fields(asked)))
        except NotStable:
            plan = None
        if not isinstance(plan, dict | str) or (isinstance(plan, str) and Path(plan).exists()):
            return EACH_TIME(asked, sizes, *args, **options)
        if key in _KNOWN:
            return _KNOWN[key]
        found = EACH_TIME(asked, sizes, *args, **options)
        if found.given.derived is None:
            _KNOWN[key] = found
        return found

    put(Asked, "compiled", once)


def _digest(*values: Any) -> str:
    found = Fingerprint()
    found.add(*values)
    return found.hexdigest()
