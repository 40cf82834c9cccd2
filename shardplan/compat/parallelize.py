"""From a config, a mesh and anything that names a plan to `apply_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.api import apply_plan, convert_plan
from shardplan.compiler.overrides import Logits
from shardplan.compiler.user_inputs import AnyPlan
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import canonical_axis
from shardplan.core.plan import Plan
from shardplan.model.adapters import unwrapped
from shardplan.report import text
from shardplan.runtime.apply.plan_mesh import read_mesh

from .configs import DistributedConfig

OURS = ("version", "extends", "tensor_parallel", "sequence_parallel", "data_parallel")  # what a plan of ours has
FILES = (".yaml", ".yml", ".json")
# Names that configurations of others give to a plan, all of which are the model's own.
NAMED = ("llama_nemotron_super_tp_plan",)


def plan_for(model: nn.Module, plan: AnyPlan | None) -> AnyPlan:
    """The plan of ours that something names.

    Args:
        plan: None, or a name of theirs (`NAMED`): the built-in plan for the model. A plan of ours: its content, a file, a built-in name. Else it is
            converted: "hf", a dictionary from names to styles (of any project, by name or as objects), or the import
            path of such a dictionary, or of a function that returns one.

    Raises:
        PlanError: an entry has no counterpart; the import fails.
        ValueError: an empty dictionary.
    """
    if plan is None or plan in NAMED:
        return "auto"
    if isinstance(plan, Mapping) and not plan:
        raise ValueError(
            "an empty plan splits nothing: None is the model's own plan, and a mesh whose tp axis has one rank is data parallelism alone"
        )
    if isinstance(plan, Plan) or (isinstance(plan, Mapping) and any(word in plan for word in OURS)):
        return plan
    if isinstance(plan, str) and plan != "hf" and not _is_import_path(plan):
        return plan
    where = {"import_path": plan} if isinstance(plan, str) and plan != "hf" else {"source": plan}
    made = convert_plan(**where, model=model)
    if made.document is None:
        raise PlanError(made.report.diagnostics, text(made.report.diagnostics, made.report.sources, color=False))
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
    **data_parallel: Any,
) -> nn.Module:
    """Apply a plan with what a config says.

    Args:
        plan: as for `plan_for`.
        axes, moe_mesh: as for `apply_plan`.
        logits: as for `apply_plan`; None: `logits_for`.
        data_parallel: more fields of that section.

    Raises:
        ValueError: the mesh has several pp ranks.
    """
    sizes = read_mesh(mesh, axes, moe_mesh=moe_mesh).sizes
    if sizes.pp > 1:
        raise ValueError(
            f"the mesh has {sizes.pp} ranks on its axis pp, and what is here shards whole models: shardplan.apply_plan cuts a model "
            "into stages"
        )
    arguments = config.arguments(model)
    arguments["data_parallel"] |= data_parallel
    if isinstance(plan, Mapping) and not plan and (sizes.tp or 1) == 1:
        plan = None
    logits = logits_for(model, plan) if logits is None else logits
    return apply_plan(model, mesh, plan_for(model, plan), axes=axes, moe_mesh=moe_mesh, logits=logits, **arguments)


def logits_for(model: nn.Module, plan: AnyPlan | None) -> Logits:
    """Which logits a model returns where nothing is said: split over the vocabulary, for a causal language model whose plan is not the
    caller's own; the loss of others does not take them."""
    own = plan is not None and plan not in ("hf", *NAMED)
    encoded = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    causal = getattr(unwrapped(model), "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration") and not encoded
    return "as_stored" if causal and not own else "plan"


def axes_of(mesh: DeviceMesh, **names: str) -> dict[str, str]:
    """The `axes` argument of `apply_plan` for names that a caller gives; what the mesh lacks is read off its others.

    Args:
        names: our axis -> the name of the mesh's, or of several of its axes that were flattened.

    Raises:
        ValueError: an axis that the mesh has under no name.
    """
    axes = {}
    for axis, name in names.items():
        if name in (mesh.mesh_dim_names or ()):
            axes[axis] = name
        elif canonical_axis(name) is None:
            try:
                mesh[name]
            except KeyError:
                raise ValueError(f"the mesh has no axis {name!r}, only {mesh.mesh_dim_names}") from None
    return axes
