"""PLAN `auto`: the one built-in plan that is for the model. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shardplan.core.tree import ModuleTree

from .model_codes import NO_PLAN, SEVERAL_PLANS
from .model_findings import nearest, refuse


class Named(Protocol):
    """What is read of a plan file: its name, and the model types and class names that it is for."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> tuple[str, ...]: ...


def choose_plan(tree: ModuleTree, plans: Iterable[Named]) -> str:
    """The name of the one plan that names the model's class (or its nearest base that any plan names), else
    of the one that names its model type.

    Raises:
        PlanError: SP511 where there is none, SP512 where there are several.
    """
    plans = tuple(plans)
    for wanted in (*tree.class_names, tree.model_type):
        matching = tuple(sorted(plan.name for plan in plans if wanted in plan.models))
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise refuse(
                SEVERAL_PLANS,
                f"the plans {', '.join(matching)} are all for {wanted}",
                help=f"name one of them: {', '.join(matching)}",
            )
    raise refuse(NO_PLAN, f"no built-in plan is for {_described(tree)}", help=_suggestion(tree, plans))


def _described(tree: ModuleTree) -> str:
    name = tree.class_names[0] if tree.class_names else "the model"
    return f"{name} (model type {tree.model_type})" if tree.model_type else name


def _suggestion(tree: ModuleTree, plans: tuple[Named, ...]) -> str:
    for_model = {model.lower(): plan.name for plan in plans for model in plan.models}
    wanted = [word for word in (tree.model_type, *tree.class_names[:1]) if word]
    near = dict.fromkeys(for_model[model] for word in wanted for model in nearest(word, for_model))
    listed = f"nearest: {', '.join(near)}" if near else "`shardplan init` writes a plan for any model"
    return (
        f"name a plan file (at tp 1 `auto` needs none); a built-in plan may serve as its parent (`extends`); {listed}"
    )
