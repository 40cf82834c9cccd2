"""Calling `apply_plan` with a config, a mesh and anything that can name a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan import Plan, PlanError, apply_plan
from shardplan.convert import convert_plan

from .configs import DistributedConfig
from .multimodal import unwrapped

AnyPlan = Plan | Mapping[str, Any] | str | PathLike[str]
Logits = Literal["plan", "replicated", "sharded", "fused", "as_stored"]  # as for `apply_plan`
OURS = ("version", "extends", "tensor_parallel", "sequence_parallel", "data_parallel")  # keys of shardplan's plans
FILES = (".yaml", ".yml", ".json")
# Names for a plan in other projects' configurations; each means the model's own plan.
NAMED = ("llama_nemotron_super_tp_plan",)
NAMES = {  # that axes have
    "tp": ("tp", "tensor_parallel", "tensor", "model"),
    "pp": ("pp", "pipeline_parallel"),
    "cp": ("cp", "context_parallel"),
    "dp_replicate": ("dp_replicate",),
    "dp_shard": ("dp_shard", "dp", "data_parallel"),
    "ep": ("ep",),
}
# Axis names in functions and scripts; a mesh need not have these axes.
USUAL = (
    "dp_replicate",
    "dp_shard_cp",
    "dp_cp",
    "dp",
    "data_parallel",
    "cp",
    "context_parallel",
    "tp",
    "tensor_parallel",
)
EP, EP_SHARD = "ep", "ep_shard"
LEADING = ("pp", "dp_replicate")  # the axes that a moe_mesh may have before (ep_shard, ep)
SHOWN = 4


def plan_for(model: nn.Module, plan: AnyPlan | None) -> AnyPlan:
    """The plan of shardplan's that an argument names.

    Args:
        plan: None, or one of the names in `NAMED`: the built-in plan for the model. A plan of shardplan's: its content, a file or a
            built-in name. Anything else is converted: "hf", a dictionary from names to styles (of any project, by name or as objects),
            or the import path of such a dictionary or of a function that returns one.

    Raises:
        PlanError: an entry has no counterpart; the import fails.
        ValueError: an empty dictionary.
    """
    if plan is None or plan in NAMED:
        return "auto"
    if isinstance(plan, Mapping) and not plan:
        raise ValueError(
            "an empty plan splits nothing: pass None for the model's own plan, or use a mesh with one tp rank for data parallelism alone"
        )
    if isinstance(plan, Plan) or (isinstance(plan, Mapping) and any(word in plan for word in OURS)):
        return plan
    if isinstance(plan, str) and plan != "hf" and not _is_import_path(plan):
        return plan
    where = {"import_path": plan} if isinstance(plan, str) and plan != "hf" else {"source": plan}
    made = convert_plan(**where, model=model)
    if made.document is None:
        raise PlanError(made.report.diagnostics, str(made.report))
    return made.document


def _is_import_path(word: str) -> bool:
    return ("." in word or ":" in word) and not word.endswith(FILES) and "/" not in word and "\\" not in word


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: DistributedConfig,
    plan: AnyPlan | None = None,
    axes: Mapping[str, str] | None = None,
    moe_mesh: DeviceMesh | None = None,
    logits: Logits | None = None,
    reapply_trainability: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Apply a plan with the settings of a config.

    Args:
        plan: as for `plan_for`.
        axes: as for `apply_plan`.
        moe_mesh: the axes (ep_shard, ep) over the mesh's ranks; None is the ep of `build_mesh`, else no expert parallelism.
        logits: as for `apply_plan`; None is what `logits_for` returns.
        reapply_trainability: called with the model before anything is changed; it sets `requires_grad` of parameters.

    Raises:
        ValueError: the mesh has several pp ranks.
    """
    if (stages := axis_size(mesh, "pp", axes)) > 1:
        raise ValueError(
            f"the mesh has {stages} ranks on its axis pp, but this function shards whole models: shardplan.apply_plan cuts a model "
            "into stages"
        )
    if reapply_trainability is not None:
        reapply_trainability(model)
    arguments = config.arguments(model)
    ep = None if moe_mesh is None else ep_of(mesh, moe_mesh)
    if isinstance(plan, Mapping) and not plan and axis_size(mesh, "tp", axes) == 1:
        plan = None
    logits = logits_for(model, plan) if logits is None else logits
    return apply_plan(model, mesh, plan_for(model, plan), axes=axes, ep=ep, logits=logits, **arguments)


def axis_size(mesh: DeviceMesh, axis: str, axes: Mapping[str, str] | None = None) -> int:
    """The number of ranks on an axis, by its name in `axes` or one of `NAMES`; 1 where the mesh has no such axis."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return next((sizes[name] for name in ((axes or {}).get(axis), *NAMES[axis]) if name in sizes), 1)


def ep_of(mesh: DeviceMesh, moe_mesh: DeviceMesh) -> int:
    """The size of the ep axis of a moe_mesh. Its ep groups must be those that `apply_plan` takes from the mesh.

    Raises:
        TypeError: the moe_mesh is not a DeviceMesh.
        ValueError: it has other axes or other ep groups.
    """
    if not isinstance(moe_mesh, DeviceMesh):
        raise TypeError(f"moe_mesh must be a torch DeviceMesh, not {type(moe_mesh).__name__}")
    names = tuple(moe_mesh.mesh_dim_names or ())
    if names[-2:] != (EP_SHARD, EP) or any(name not in LEADING for name in names[:-2]):
        raise ValueError(
            f"moe_mesh must have the axes ({EP_SHARD}, {EP}), with {' or '.join(LEADING)} before them at most, not {names}"
        )
    ep = moe_mesh.size(moe_mesh.ndim - 1)
    if mesh.size() % ep:
        raise ValueError(f"moe_mesh has {ep} ranks on its ep axis, which do not divide the {mesh.size()} of the mesh")
    ours, theirs = (one.mesh.reshape(-1, ep).tolist() for one in (mesh, moe_mesh))
    if sorted(ours) != sorted(theirs):
        raise ValueError(
            f"the ep groups of moe_mesh are {_some([g for g in theirs if g not in ours] or theirs)}, but those of the mesh are "
            f"{_some([g for g in ours if g not in theirs] or ours)}: ep is taken from the innermost ranks of dp_shard x cp x "
            "tp. Pass ep to build_mesh instead of a moe_mesh, or a moe_mesh with these groups"
        )
    return ep


def _some(groups: list[list[int]]) -> str:
    more = len(groups) - SHOWN
    return ", ".join(map(str, groups[:SHOWN])) + (f" and {more} more" if more > 0 else "")


def logits_for(model: nn.Module, plan: AnyPlan | None) -> Logits:
    """The logits that a model returns by default. A causal language model whose plan is not the caller's own returns them split over
    the vocabulary; the losses of other models cannot take split logits."""
    own = plan is not None and plan not in ("hf", *NAMED)
    encoded = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    causal = getattr(unwrapped(model), "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration") and not encoded
    return "as_stored" if causal and not own else "plan"


def axes_of(mesh: DeviceMesh, **names: str) -> dict[str, str]:
    """The `axes` argument of `apply_plan` for the caller's axis names. A name that the mesh lacks is resolved from its other axes.

    Args:
        names: shardplan's axis -> the name of the mesh's axis, or of several flattened axes.

    Raises:
        ValueError: the mesh has no such axis under any name.
    """
    axes = {}
    for axis, name in names.items():
        if name in (mesh.mesh_dim_names or ()):
            axes[axis] = name
        elif name not in USUAL:
            try:
                mesh[name]
            except KeyError:
                raise ValueError(f"the mesh has no axis {name!r}, only {mesh.mesh_dim_names}") from None
    return axes
