"""Models and plans as users give them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.plan import Plan, PlanFile
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleTree

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from shardplan.language import Parsed
    from shardplan.model import FoundModel

AnyInputs = str | Callable[[int], Mapping[str, Any]]
AnyReduced = str | Callable[[], "nn.Module"]
AnyModel = Union[str, "nn.Module", "PreTrainedConfig", "Model"]
AnyPlan = Plan | Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class Model:
    """A model as the user names it, so that other processes can find it too.

    Args:
        name: a word, a configuration or a module.
        settings: numbers of the configuration to change, where it is a word.
        inputs: what to call the reduced model with: `module:callable`, or the function.
        reduced: what builds a reduced model of the same structure: `module:callable`, or the function.
        trust_remote_code: run code that a model's folder brings along, where it is a word.
    """

    name: str | nn.Module | PreTrainedConfig
    settings: Mapping[str, Any] | None = None
    inputs: AnyInputs | None = None
    reduced: AnyReduced | None = None
    trust_remote_code: bool = False

    @property
    def shown(self) -> str:
        return self.name if isinstance(self.name, str) else type(self.name).__name__

    def find(self) -> FoundModel:
        """Raises PlanError (SP501 to SP515) and TypeError."""
        from shardplan.model import find_any

        return find_any(
            self.name,
            settings=self.settings or {},
            trust_remote_code=self.trust_remote_code,
            inputs=self.inputs,
            reduced=self.reduced,
        )


def find_model(source: Model) -> tuple[FoundModel | None, tuple[Diagnostic, ...]]:
    """The model, or None and why not."""
    try:
        found = source.find()
    except PlanError as error:
        return None, error.diagnostics
    return found, found.diagnostics


def read_plan(
    plan: AnyPlan, found: FoundModel | None, *, split: bool = True
) -> tuple[PlanFile | None, SourceMap, tuple[Diagnostic, ...]]:
    """The plan and its text, or None and why not. A plan that depends on a model that was not found has no findings.

    Args:
        split: whether tp may be above 1; if not, `auto` is for data parallelism alone.
    """
    from shardplan.language import parse_plan

    from .unsplit import unsplit_plan

    if isinstance(plan, Plan):
        return plan.file, plan.sources, plan.diagnostics
    if plan not in ("auto", "hf"):
        parsed = parse_plan(plan)
        return parsed.plan, parsed.sources, parsed.diagnostics
    if found is None:
        return None, SourceMap(), ()
    try:
        parsed = _hf_plan(found) if plan == "hf" else auto_plan(found.tree) if split else unsplit_plan(found)
    except PlanError as error:
        return None, SourceMap(), error.diagnostics
    return parsed.plan, parsed.sources, parsed.diagnostics


def auto_plan(tree: ModuleTree) -> Parsed:
    """The one built-in plan for the model of a tree.

    Raises:
        PlanError: SP511, SP512.
    """
    from shardplan.language import builtin_plans, parse_plan
    from shardplan.model import choose_plan

    wanted = (*tree.class_names, str(tree.model_type))
    texts = {name: path.read_text("utf-8") for name, path in builtin_plans().items()}
    naming = [name for name, text in texts.items() if any(word in text for word in wanted)]  # few of many are parsed
    plans = [parse_plan(name).plan for name in naming or texts]
    return parse_plan(choose_plan(tree, [plan for plan in plans if plan is not None]))


def _hf_plan(found: FoundModel) -> Parsed:
    """The tensor-parallel plan that transformers has for the model.

    Raises:
        PlanError: SP514.
    """
    from shardplan.language import from_hf_tp_plan
    from shardplan.model import hf_tp_plan

    return from_hf_tp_plan(*hf_tp_plan(found.build()))


def plan_name(plan: AnyPlan) -> str:
    if isinstance(plan, (str, os.PathLike)):
        return os.fspath(plan)
    return plan.name if isinstance(plan, Plan) else str(plan.get("name", "<dict>"))
