"""The plan `auto`: the built-in plan that is for the model. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardplan.core.diagnostics import Code, PlanError
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleTree

from .model_findings import nearest, refuse

NO_PLAN = Code("SP511")
SEVERAL_PLANS = Code("SP512")


def choose_plan(tree: ModuleTree, plans: Sequence[PlanFile], admits: Callable[[PlanFile], bool]) -> PlanFile | None:
    """The plan that names the model's class, or its nearest base class that a plan names; else the plan that names its model
    type; else None. Plans for other configurations are not considered.

    Args:
        admits: whether the `for` of a plan holds; called only for plans that name the model.

    Raises:
        PlanError: SP512 where there are several plans; what `admits` raises.
    """
    for wanted in (*tree.class_names, tree.model_type):
        matching = [plan for plan in plans if wanted in plan.models and admits(plan)]
        if len(matching) > 1:
            names = ", ".join(sorted(plan.name for plan in matching))
            raise refuse(SEVERAL_PLANS, f"the plans {names} are all for {wanted}", help=f"name one of them: {names}")
        if matching:
            return matching[0]
    return None


def no_plan(tree: ModuleTree, plans: Iterable[PlanFile]) -> PlanError:
    """SP511: no built-in plan is for the model."""
    plans = tuple(plans)
    wanted = (*tree.class_names, tree.model_type)
    others = (plan for plan in plans if plan.configurations is not None and not set(wanted).isdisjoint(plan.models))
    return refuse(
        NO_PLAN,
        f"no built-in plan is for {_described(tree)}",
        notes=tuple(f"the plan {plan.name} is for configurations with `{plan.configurations}`" for plan in others),
        help=_suggestion(tree, plans),
    )


def _described(tree: ModuleTree) -> str:
    name = tree.class_names[0] if tree.class_names else "the model"
    return f"{name} (model type {tree.model_type})" if tree.model_type else name


def _suggestion(tree: ModuleTree, plans: tuple[PlanFile, ...]) -> str:
    for_model = {model.lower(): plan.name for plan in plans for model in plan.models}
    wanted = [word for word in (tree.model_type, *tree.class_names[:1]) if word]
    near = dict.fromkeys(for_model[model] for word in wanted for model in nearest(word, for_model))
    listed = f"; nearest: {', '.join(near)}" if near else ""
    return (
        "let `auto` derive a plan (without `derive=False`, `--no-derive`, `--quick`), or name a plan file; a built-in plan may "
        f"serve as its parent (`extends`){listed}"
    )
