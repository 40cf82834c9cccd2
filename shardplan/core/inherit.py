"""What a plan's sections come to when it extends another: its own fields, and else its parent's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

from .plan import DDP, ActivationCheckpointing, Compile, DataParallel, MegatronFSDP, MixedPrecision, PlanFile

_S = TypeVar("_S", DataParallel, ActivationCheckpointing, Compile, MixedPrecision, MegatronFSDP, DDP)


@dataclass(frozen=True, slots=True)
class Sections:
    """The sections that hold for a plan; None where neither it nor an ancestor has one.

    A field's place is the document that sets it: `sections.data_parallel.given["units"]`.
    """

    data_parallel: DataParallel | None
    activation_checkpointing: ActivationCheckpointing | None
    compile: Compile | None


def effective_sections(plan: PlanFile) -> Sections:
    """The sections of a plan together with what it inherits, field by field.

    Rules are not among them: their layers meet per module, when they are bound.
    """
    lineage = plan.lineage
    return Sections(
        data_parallel=reduce(_over, (one.data_parallel for one in lineage), None),
        activation_checkpointing=reduce(_over, (one.activation_checkpointing for one in lineage), None),
        compile=reduce(_over, (one.compile for one in lineage), None),
    )


def _over(parent: _S | None, child: _S | None) -> _S | None:
    """The child's section laid over its parent's."""
    if parent is None or child is None:
        return child if parent is None else parent
    changes = {name: getattr(child, name) for name in child.given}
    for name in ("mixed_precision", "megatron_fsdp", "ddp"):  # sections inside a section
        if name in changes:
            changes[name] = _over(getattr(parent, name), changes[name])
    if hasattr(child, "location"):
        changes["location"] = child.location
    return replace(parent, **changes, given={**parent.given, **child.given})
