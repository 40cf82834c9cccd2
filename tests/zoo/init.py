"""What `init` finds for one model type, without looking at the built-in plans, judged as these are."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardplan.authoring.init.derive import Derived, derive
from shardplan.authoring.init.new import written
from shardplan.compiler.bind import bind
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, overlays_of
from shardplan.core.tree import ModuleTree
from shardplan.language import parse_plan
from tests.model_settings import find
from tests.soundness.judge import fitting

from .entry import SIZES, Entry, has, proven


def by_init(before: Entry) -> Entry:
    """The entry of a type with what `init` writes for it at the first size; "none" where it says that it cannot.

    Args:
        before: the entry. Where `init` writes rules that say the same as those of the built-in plan, what was found out about
            that plan holds.
    """
    torch.set_num_threads(1)
    name = before.name
    try:
        found = find(name)
        derived = derive(found, SIZES[0], sequence_parallel=True)
    except PlanError as error:
        return _none(before, error.diagnostics[0].message)
    except Exception as error:  # of the model's own code
        return _none(before, f"{type(error).__name__}: {error}")
    if not derived.draft.tensor_parallel:
        return _none(before, "nothing can be split")
    plan = parse_plan(dict(written(found, derived).document), name="init").plan
    if before.plan is not None and before.verdicts and same_rules(found.tree, plan, parse_plan(before.plan).plan):
        return replace(
            before, init=before.verdicts, init_more=[w for w in before.collectives if before.more(w)], init_why=[]
        )
    small = {tp: fitting(name, tp, plan) for tp in SIZES}
    made = proven(name, found.tree, plan, small)
    more = [word for word in made.collectives if made.more(word)]
    less = [word for word in ("tp", "sp") if before.has(word) and not has(made.verdicts, word)]
    less += [word for word in more if word in before.collectives and not before.more(word)]
    return replace(before, init=made.verdicts, init_more=more, init_why=_why(derived) if less else [])


def _why(derived: Derived) -> list[str]:
    """What stands in the way, the most important first."""
    parts = (*derived.gathered, *derived.whole)
    found = [f"{', '.join(one.patterns)}: {one.forbidden.reason}" for one in parts]
    return [derived.no_overlay, *found] if derived.no_overlay else found


def _none(before: Entry, why: str) -> Entry:
    return replace(before, init={f"tp{SIZES[0]}": f"none: {why}"}, init_more=[], init_why=[])


def same_rules(tree: ModuleTree, plan: PlanFile, other: PlanFile) -> bool:
    """Whether two plans say the same of every module and parameter of a model, with their overlays and without."""
    if plan.has_overlay != other.has_overlay:
        return False
    return all(_said(tree, plan, on) == _said(tree, other, on) for on in {False, plan.has_overlay})


def _said(tree: ModuleTree, plan: PlanFile, overlay: bool) -> dict[str, tuple]:
    resolved, _ = bind(plan, tree, MeshSizes(), overlays_of(overlay))
    return {name: (a.rule.style, *a.rule.options.items()) for name, a in resolved.assignments.items()}
