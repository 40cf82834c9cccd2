"""Models and plans as users give them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Union

from shardplan.core.diagnostics import Diagnostic, PlanError
from shardplan.core.mesh import MeshSizes, named_sizes
from shardplan.core.plan import Plan, PlanFile
from shardplan.core.sources import SourceMap
from shardplan.core.tree import ModuleTree

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig

    from shardplan.models import FoundModel
    from shardplan.parse import Parsed

AnyInputs = str | Callable[[int], Mapping[str, Any]]
AnyReduced = str | Callable[[], "nn.Module"]
AnyModel = Union[str, "nn.Module", "PreTrainedConfig", "Model"]
AnyPlan = Plan | Mapping[str, Any] | str | os.PathLike[str]
AnyMesh = Union[Mapping[str, int], MeshSizes, "DeviceMesh"]


class ModelOptions(TypedDict, total=False):
    """The fields of `Model` beside its name, as keyword arguments of the functions that take a model."""

    settings: Mapping[str, Any] | None
    inputs: AnyInputs | None
    reduced: AnyReduced | None
    trust_remote_code: bool


class MeshOptions(TypedDict, total=False):
    """The sizes of a mesh as keyword arguments of the functions that take one."""

    tp: int | None
    dp_shard: int
    dp_replicate: int
    cp: int


@dataclass(frozen=True)
class Model:
    """A model as the user names it, so that other processes can find it too.

    Args:
        name: a word, a configuration or a module.
        settings: numbers of the configuration to change, where it is a word.
        inputs: what to call the reduced model with: `module:callable`, or the function.
        reduced: what builds a small model of the same structure: `module:callable`, or the function.
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
        from shardplan.models import find_any

        return find_any(
            self.name,
            settings=self.settings or {},
            trust_remote_code=self.trust_remote_code,
            inputs=self.inputs,
            reduced=self.reduced,
        )


def said(function: str, options: Mapping[str, Any], *kinds: type) -> list[Any]:
    """The keyword arguments of a function by the TypedDict that has them.

    Raises:
        TypeError: a name that none of these has.
    """
    known = {name for kind in kinds for name in kind.__annotations__}
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return [{name: options[name] for name in kind.__annotations__ if name in options} for kind in kinds]


def model_of(model: AnyModel, options: ModelOptions) -> Model:
    """What a function was called with, as one record.

    Raises:
        TypeError: a `Model`, and options that belong into it.
    """
    if not isinstance(model, Model):
        return Model(model, **options)
    if given := [name for name, value in options.items() if value]:
        raise TypeError(f"{', '.join(given)}: say it in the Model that is given, not beside it")
    return model


def sizes_of(mesh: AnyMesh | None, options: MeshOptions) -> MeshSizes:
    """The sizes that a function was called with: of a mesh, a mapping from axes, or by keywords.

    Raises:
        ValueError: an axis that is none, two names of one axis, a size that is no positive integer.
        TypeError: both a mesh and sizes.
    """
    if mesh is None:
        return MeshSizes(**options)
    if options:
        raise TypeError(f"{', '.join(options)}: say the sizes in the mesh or beside it, not both")
    if isinstance(mesh, MeshSizes):
        return mesh
    if isinstance(mesh, Mapping):
        return named_sizes(mesh)
    from shardplan.apply.mesh import read_mesh

    return read_mesh(mesh).sizes


def find_model(source: Model) -> tuple[FoundModel | None, tuple[Diagnostic, ...]]:
    """The model, or None and why not."""
    try:
        found = source.find()
    except PlanError as error:
        return None, error.diagnostics
    return found, found.diagnostics


def read_plan(plan: AnyPlan, found: FoundModel | None) -> tuple[PlanFile | None, SourceMap, tuple[Diagnostic, ...]]:
    """The plan and its text, or None and why not. What depends on a model that was not found has no findings."""
    from shardplan.parse import parse_plan

    if isinstance(plan, Plan):
        return plan.file, plan.sources, plan.diagnostics
    if plan not in ("auto", "hf"):
        parsed = parse_plan(plan)
        return parsed.plan, parsed.sources, parsed.diagnostics
    if found is None:
        return None, SourceMap(), ()
    try:
        parsed = auto_plan(found.tree) if plan == "auto" else _hf_plan(found)
    except PlanError as error:
        return None, SourceMap(), error.diagnostics
    return parsed.plan, parsed.sources, parsed.diagnostics


def auto_plan(tree: ModuleTree) -> Parsed:
    """The one built-in plan for the model of a tree.

    Raises:
        PlanError: SP511, SP512.
    """
    from shardplan.models import choose_plan
    from shardplan.parse import builtin_plans, parse_plan

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
    from shardplan.models import hf_tp_plan
    from shardplan.parse import from_hf_tp_plan

    return from_hf_tp_plan(*hf_tp_plan(found.build()))


def plan_name(plan: AnyPlan) -> str:
    if isinstance(plan, (str, os.PathLike)):
        return os.fspath(plan)
    return plan.name if isinstance(plan, Plan) else str(plan.get("name", "<dict>"))
