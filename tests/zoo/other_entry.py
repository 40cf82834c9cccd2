"""What is found out about one class that is no causal language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from shardplan.compiler.automatic import ReadPlan, auto_plan
from shardplan.compiler.bind import bind
from shardplan.compiler.lower import split_parameters
from shardplan.core.coverage import covered
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile
from shardplan.model.found import FoundModel
from tests.model_settings import find_once
from tests.soundness.judge import fitting, subject

from .entry import DERIVED, SIZES, WORTH_SAYING, derived_plan, has, judged
from .other_names import is_trunk

OF_TRUNK = "trunk's"  # in place of a built-in plan's name: the plan that was derived for the type's trunk


@dataclass(frozen=True)
class OtherEntry:
    """A class.

    Args:
        name: the class.
        plan: the built-in plan for it; "derived", or "trunk's"; None where there is none.
        inputs: the kinds of input that the verdicts are of.
        verdicts: "tp2", "sp2" and so on -> as in `Entry`.
        split: the share of the parameters inside the layers that is split over tp, in the default configuration.
        whole: what is not: part of a layer -> its share.
        reason: why there is no plan, or no verdict.
        no_overlay: why the plan has no sequence parallelism.
        judged: as in `Entry`.
    """

    name: str
    plan: str | None = None
    inputs: list[str] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)
    split: float = 0.0
    whole: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    no_overlay: str = ""
    judged: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_right(self) -> bool:
        """Whether loss, outputs and gradients are the unsharded model's, and something inside the layers is split."""
        return has(self.verdicts, "tp") and self.split > 0

    @property
    def has_sequence(self) -> bool:
        """Whether that is so with sequence parallelism too."""
        return self.is_right and has(self.verdicts, "sp")


@cache
def derived_of(name: str) -> tuple[PlanFile | None, str]:
    """As `derived_plan`, once in a process."""
    return derived_plan(find_once(name))


def plan_of(trunk: str) -> PlanFile | None:
    """The plan that is derived for a class; None where that is not possible."""
    try:
        return derived_of(trunk)[0]
    except Exception:  # of the modelling code; its own entry says what
        return None


def other_entry(
    name: str, of_trunk: Callable[[], PlanFile | None] = lambda: None, sizes: Sequence[int] = SIZES[:1]
) -> OtherEntry:
    """Find out about a class.

    Args:
        of_trunk: the plan that is derived for the trunk of the class. It is the class's too where it is right for it.
        sizes: of tp.
    """
    torch.set_num_threads(1)
    try:
        found = find_once(name)
    except PlanError as error:
        return OtherEntry(name, reason=f"cannot be built: {_said(error)}")
    own = auto_plan(found.tree, ReadPlan).plan
    try:
        small = {tp: fitting(name, tp, own) if own is not None else subject(name, tp) for tp in sizes}
    except PlanError as error:
        return OtherEntry(name, own and own.name, reason=_said(error))
    except Exception as error:  # of the model's own code
        return OtherEntry(name, own and own.name, reason=f"does not run: {type(error).__name__}: {error}")
    inputs = list(small[sizes[0]].recorded_models)

    def entry(plan: PlanFile, said: str, why: str) -> OtherEntry:
        verdicts = {f"{word}{tp}": text for (word, tp), (text, _) in judged(found.tree, plan, small).items()}
        split, whole = _split(found, plan)
        return OtherEntry(name, said, inputs, verdicts, split, whole, no_overlay=why)

    if own is not None:
        return entry(own, own.name, "")
    shared = of_trunk() if not is_trunk(name) else None
    if shared is not None:
        one = entry(shared, OF_TRUNK, "")
        if one.is_right and (one.has_sequence or not shared.has_overlay):
            return one
    plan, why = derived_of(name)
    if plan is None:
        return OtherEntry(name, inputs=inputs, reason=why or "nothing can be split")
    one = entry(plan, DERIVED, why)
    return one if plan.has_overlay else _with_wider_picture(one, found, sizes)


def _with_wider_picture(one: OtherEntry, found: FoundModel, sizes: Sequence[int]) -> OtherEntry:
    """As it is, with what is proven of sequence parallelism for a picture one patch wider, where there is an overlay then: the position
    of the class is next to the patches, and tp may divide the number of both for every other side alone."""
    side, patch = (_side(getattr(found.config, field, None)) for field in ("image_size", "patch_size"))
    if side is None or patch is None:
        return one
    name = f"{one.name}@{side + patch}"
    plan, _ = derived_of(name)
    if plan is None or not plan.has_overlay:
        return one
    verdicts = judged(find_once(name).tree, plan, {tp: subject(name, tp) for tp in sizes})
    proven = {f"{word}{tp}": text for (word, tp), (text, _) in verdicts.items() if word == "sp"}
    said = f"{one.no_overlay}; SP is of pictures of {side + patch} pixels a side, in place of {side}"
    return replace(one, verdicts={**one.verdicts, **proven}, no_overlay=said)


def _side(value: Any) -> int | None:
    """Of a square, in pixels."""
    if isinstance(value, (list, tuple)) and len({*value}) == 1:
        value = value[0]
    return value if type(value) is int else None


def _split(found: FoundModel, plan: PlanFile) -> tuple[float, dict[str, float]]:
    split, whole = covered(found.tree, split_parameters(bind(plan, found.tree, MeshSizes())[0]))
    return round(split, 3), {part: round(share, 3) for part, share in whole.items() if share >= WORTH_SAYING}


def _said(error: PlanError) -> str:
    return ": ".join((error.diagnostics[0].message, *error.diagnostics[0].notes))
