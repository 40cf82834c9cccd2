"""The sections of a plan that extends another: its own fields, else its parent's."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import TypeVar

from shardplan.core.options import options
from shardplan.core.plan import PlanFile
from shardplan.core.sections import Section, Sections

_S = TypeVar("_S", bound=Section)


def effective_sections(plan: PlanFile) -> Sections:
    """The sections of a plan with all that it inherits, field by field; None where neither the plan nor an ancestor has
    one.

    A field's place is the document that sets it: `sections.data_parallel.given["units"]`. Rules are not included: their
    layers meet per module, when they are bound.
    """
    held = {name: [getattr(one, name) for one in plan.lineage] for name in options(Sections)}
    return Sections(**{name: reduce(_over, layers) for name, layers in held.items()})


def _over(parent: _S | None, child: _S | None) -> _S | None:
    """The child's section, which overrides its parent's."""
    if parent is None or child is None:
        return child if parent is None else parent
    changes = {name: getattr(child, name) for name in child.given}
    inner = {name: _over(getattr(parent, name), one) for name, one in changes.items() if isinstance(one, Section)}
    return replace(parent, **changes | inner, location=child.location, given={**parent.given, **child.given})
