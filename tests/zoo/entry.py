"""What is found out about one model type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardplan.bind import bind
from shardplan.check import check
from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleTree, block, element
from shardplan.lower import lower
from shardplan.lower.collectives import expected_collectives
from shardplan.models import choose_plan
from shardplan.parse import builtin_plans, parse_plan
from tests.model_settings import find
from tests.soundness.judge import Subject, judge, subject

SIZES = (2, 4)
# Structural findings that say: not at this size, with the head counts of the type's default configuration.
SIZE_CODES = ("SP301", "SP302", "SP303", "SP304", "SP305")


@dataclass(frozen=True)
class Entry:
    """A model type.

    Args:
        name: the type.
        plan: the built-in plan for it, or None.
        verdicts: "tp2", "sp2" and so on (without and with sequence parallelism, at each size) -> "right" (`validate` has
            no finding, and loss, logits and every gradient are the unsharded model's); "size SPnnn" (its default
            configuration does not allow the size); "none" (no overlay); or what is wrong.
        sharded: the share of the bytes of the parameters inside the layers that is split over tp.
        collectives: at tp 2, a step's, by variant: "forward" and "backward" -> operation -> how many.
        reason: why there is no plan, or no verdict.
    """

    name: str
    plan: str | None = None
    verdicts: dict[str, str] = field(default_factory=dict)
    sharded: float = 0.0
    collectives: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    reason: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """As the machine-readable table has it."""
        return asdict(self)

    def has(self, variant: str) -> bool:
        """Whether the plan is right at a size of the variant ("tp" or "sp"), and wrong at none."""
        said = [text for key, text in self.verdicts.items() if key.startswith(variant)]
        return "right" in said and all(text == "right" or text.startswith("size ") for text in said)


def entry(name: str) -> Entry:
    """Find out about a model type."""
    torch.set_num_threads(1)
    try:
        found = find(name)
    except PlanError as error:
        return Entry(name, reason=f"cannot be built: {error.diagnostics[0].message}")
    plans = [parse_plan(plan).plan for plan in builtin_plans()]
    try:
        plan = parse_plan(choose_plan(found.tree, plans)).plan
    except PlanError:
        plan = None
    try:
        small = {tp: subject(name, tp) for tp in SIZES}
    except PlanError as error:
        about = error.diagnostics[0]
        return Entry(name, plan.name if plan else None, reason=": ".join((about.message, *about.notes)))
    except Exception as error:  # of the model's own code
        return Entry(name, plan.name if plan else None, reason=f"does not run: {type(error).__name__}: {error}")
    if plan is None:
        return Entry(name, reason="no built-in plan is for it")
    verdicts = {
        f"{word}{tp}": _structure(found.tree, plan, tp, on) or _verdict(small[tp], plan, on)
        for word, on in (("tp", False), ("sp", True))
        for tp in SIZES
    }
    return Entry(
        name,
        plan.name,
        verdicts,
        _sharded(small[SIZES[0]], plan),
        {
            word: _collectives(small[SIZES[0]], plan, word == "sp")
            for word in ("tp", "sp")
            if verdicts[f"{word}{SIZES[0]}"] == "right"
        },
    )


def _structure(tree: ModuleTree, plan: PlanFile, tp: int, overlay: bool) -> str:
    """What is said against the plan for the model itself; nothing of what is the model's alone (its dropout)."""
    if overlay and not plan.has_overlay:
        return "none"
    resolved, about = bind(plan, tree, MeshSizes(tp=tp), sequence_parallel=overlay)
    return _structural([d for d in (*about, *check(resolved, seq_len=None)) if d.is_error and d.primary is not None])


def _structural(errors: Sequence[Diagnostic]) -> str:
    if not errors:
        return ""
    codes = sorted({d.code for d in errors})
    return f"size {codes[0]}" if set(codes) <= set(SIZE_CODES) else f"{errors[0].code}: {errors[0].message}"


def _verdict(small: Subject, plan: PlanFile, overlay: bool) -> str:
    said = judge(small, plan, sequence_parallel=overlay, help=False)
    if said.structure:
        return _structural(said.structure)
    if said.layout.diagnostics:
        about = said.layout.diagnostics[0]
        return f"{about.code}: {about.message}" + ("" if said.right else f"; {said.worst}")
    return "right" if said.right else f"valid, but wrong: {said.worst}"


def _sharded(small: Subject, plan: PlanFile) -> float:
    resolved, _ = bind(plan, small.tree, MeshSizes(tp=small.tp), sequence_parallel=False)
    split = {
        (module.name, p.name)
        for module in lower(resolved).modules.values()
        for p in module.parameters
        if p.dim is not None
    }
    inside = [
        ((owner.name, p.name) in split, p.numel)
        for owner, p in small.tree.parameters.values()
        if element(block(owner.name))
    ]
    total = sum(n for _, n in inside)
    return round(sum(n for on, n in inside if on) / total, 3) if total else 0.0


def _collectives(small: Subject, plan: PlanFile, overlay: bool) -> dict[str, dict[str, int]]:
    resolved, _ = bind(plan, small.tree, MeshSizes(tp=small.tp), sequence_parallel=overlay)
    counted = expected_collectives(lower(resolved).modules)
    return {when: dict(sorted(counts.items())) for when, counts in counted.items()}
