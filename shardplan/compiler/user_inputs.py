"""Models and plans as users give them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Union

from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.plan import Plan

from .automatic import Derive, ReadPlan, auto_plan

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
        name: a word as on the command line (a folder or config.json, a cached hub id, a model type, `module:callable`), a
            transformers configuration, or a module on any device.
        settings: numbers of the configuration to change, if `name` is a word.
        inputs: inputs of the reduced model: a function from a seed to keyword arguments of its `forward`, or
            `module:callable`. For a transformers model it may take the reduced configuration as a second argument.
            Without it, inputs are made from the configuration, and a module of your own gets token ids.
        reduced: what builds a reduced model of the same structure, a function without arguments or `module:callable`:
            for a module of your own of more than 2 GiB, and for models that cannot be reduced otherwise.
        trust_remote_code: run code from the model's folder, if `name` is a word.
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


class FoundOnce(Model):
    """A model that is looked up once, for many plans."""

    @cached_property
    def _found(self) -> FoundModel:
        return super().find()

    def find(self) -> FoundModel:
        return self._found


def find_model(source: Model) -> tuple[FoundModel | None, tuple[Diagnostic, ...]]:
    """The model, or None and the reason."""
    try:
        found = source.find()
    except PlanError as error:
        return None, error.diagnostics
    return found, found.diagnostics


def read_plan(plan: AnyPlan, found: FoundModel | None, *, split: bool = True, derive: Derive | None = None) -> ReadPlan:
    """The plan and its text, or why there is none. A plan that depends on a model that was not found has no findings.

    Args:
        split: whether tp may be above 1; if not, `auto` means data parallelism alone.
        derive: derives a plan for a model without a built-in plan; None: `auto` refuses such a model.
    """
    from shardplan.language import parse_plan

    from .unsplit import unsplit_plan

    if isinstance(plan, Plan):
        return ReadPlan(plan.file, plan.sources, plan.diagnostics)
    if plan not in ("auto", "hf"):
        return ReadPlan.of(parse_plan(plan))
    if found is None:
        return ReadPlan()
    try:
        if plan == "hf":
            return ReadPlan.of(_hf_plan(found))
        if not split:
            return ReadPlan.of(unsplit_plan(found))
        return auto_plan(found.tree, partial(derive, found) if derive is not None else None)
    except PlanError as error:
        return ReadPlan(findings=error.diagnostics)


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
