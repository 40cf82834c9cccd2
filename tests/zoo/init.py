"""What `init` finds for one model type, without looking at the built-in plans, judged as these are."""

from __future__ import annotations

import torch

from shardplan.bind import bind
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleTree
from shardplan.parse import parse_plan
from shardplan.synth.derive import derive
from shardplan.synth.new import written
from tests.model_settings import find
from tests.soundness.judge import subject

from .entry import SIZES, Entry, judged


def init_verdicts(before: Entry) -> dict[str, str]:
    """As `Entry.verdicts`, of the plan that `init` writes at the first size; "none" where it says that it cannot.

    Args:
        before: the entry of the type. Where `init` writes rules that say the same as those of the built-in plan, its verdicts
            are this plan's.
    """
    torch.set_num_threads(1)
    name = before.name
    try:
        found = find(name)
        derived = derive(found, SIZES[0], sequence_parallel=True)
    except PlanError as error:
        return {f"tp{SIZES[0]}": f"none: {error.diagnostics[0].message}"}
    except Exception as error:  # of the model's own code
        return {f"tp{SIZES[0]}": f"none: {type(error).__name__}: {error}"}
    if not derived.draft.tensor_parallel:
        return {f"tp{SIZES[0]}": "none: nothing can be split"}
    plan = parse_plan(dict(written(found, derived).document), name="init").plan
    if before.plan is not None and before.verdicts and same_rules(found.tree, plan, parse_plan(before.plan).plan):
        return before.verdicts
    small = {tp: subject(name, tp) for tp in SIZES}
    return {f"{word}{tp}": said for (word, tp), (said, _) in judged(found.tree, plan, small).items()}


def same_rules(tree: ModuleTree, plan: PlanFile, other: PlanFile) -> bool:
    """Whether two plans say the same of every module and parameter of a model, with their overlays and without."""
    if plan.has_overlay != other.has_overlay:
        return False
    return all(_said(tree, plan, on) == _said(tree, other, on) for on in {False, plan.has_overlay})


def _said(tree: ModuleTree, plan: PlanFile, overlay: bool) -> dict[str, tuple]:
    resolved, _ = bind(plan, tree, MeshSizes(), sequence_parallel=overlay)
    return {name: (a.rule.style, *a.rule.options.items()) for name, a in resolved.assignments.items()}
