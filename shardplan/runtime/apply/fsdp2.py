"""The data-parallel wrapping pass with FSDP2."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardplan.core.by_key import by_key
from shardplan.core.sections import DataParallel, MixedPrecision, Prefetch
from shardplan.core.tree import ancestors, innermost
from shardplan.runtime.parallel.failures import at_module
from shardplan.runtime.parallel.fsdp_units import keep_requires_grad, units_of, when_gathered
from shardplan.runtime.parallel.whole_scalars import is_whole

from .expert_units import placement_over
from .marked_parameters import mark_parameters
from .wrapped import Wrapped


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh, section: DataParallel, wrapped: Wrapped) -> nn.Module:
    """Shard the units, inner ones first; then the root, which takes the parameters outside of all units and those in several; then the
    distributed experts. Parameters that all experts of a module share belong to the unit around it. Scalars belong to no unit
    (`parallel.whole_scalars`). Returns the same model.

    Args:
        mesh: [dp_replicate,] dp_shard.
    """
    stacks = {p for name in wrapped.experts for p in model.get_submodule(name).parameters(recurse=False)}
    options = _options(model, mesh, section, wrapped)
    around = {**options, "ignored_params": options["ignored_params"] | stacks}
    _shard_units(model, around, section, wrapped)
    fully_shard(model, **around, mp_policy=_policy(section.mixed_precision))
    for name in wrapped.experts:
        with at_module(name):
            experts = model.get_submodule(name)
            shared = set(experts.parameters()) - set(experts.parameters(recurse=False))
            own = _of_experts({**options, "ignored_params": options["ignored_params"] | shared}, section, wrapped, name)
            fully_shard(experts, **own, reshard_after_forward=_reshard(section, _last(wrapped, name)))
    _keep_class_names(model)
    _prefetch(model, wrapped, section.prefetch)
    keep_requires_grad(model.modules())
    refuse_later_hooks(model)
    return model


def _keep_class_names(model: nn.Module) -> None:
    """Keep the qualified class names. FSDP2 gives a unit a new class, derived from FSDPModule and the module's class. transformers
    uses the qualified name to look up what a class records (`output_hidden_states`, which a tower's reader needs)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own, original = type(module), type(module).__bases__[-1]
            own.__module__, own.__qualname__ = original.__module__, original.__qualname__


def _shard_units(model: nn.Module, options: dict[str, Any], section: DataParallel, wrapped: Wrapped) -> None:
    names = dict.fromkeys(name for name in (*wrapped.units, *wrapped.parts) if name not in wrapped.experts)
    options = {**options, "ignored_params": options["ignored_params"] | _of_several(model, names)}
    for name in sorted(names, key=lambda unit: -unit.count(".")):
        with at_module(name):
            freed = False if _holds_fused_head(wrapped, name) else _reshard(section, _last(wrapped, name))
            unit = model.get_submodule(name)
            fully_shard(unit, **options, mp_policy=_unit_policy(section), reshard_after_forward=freed)


def _of_several(model: nn.Module, units: Container[str]) -> set[nn.Parameter]:
    """The parameters of modules that are in several units: they are the root's, which has them until the whole forward has ended."""
    found = by_key(
        (parameter, innermost(name, units)) for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    return {parameter for parameter, homes in found.items() if len(set(homes)) > 1}


def _holds_fused_head(wrapped: Wrapped, name: str) -> bool:
    """Whether a loss reads parameters of the unit after its forward has ended; backward begins with them."""
    return any(head == name or name in ancestors(head) for head in wrapped.fused_heads)


def _last(wrapped: Wrapped, name: str) -> bool:
    """Whether a module is the last unit, or in it."""
    last = wrapped.units[-1:]
    return name in last or any(above in last for above in ancestors(name))


def _unit_policy(section: DataParallel) -> MixedPrecisionPolicy:
    """Units return their compute dtype: a value in the model's output dtype would meet parameters of another dtype."""
    return replace(_policy(section.mixed_precision), output_dtype=None)


def _options(model: nn.Module, mesh: DeviceMesh, section: DataParallel, wrapped: Wrapped) -> dict[str, Any]:
    """The arguments that all calls of `fully_shard` share."""
    return {
        "mesh": mesh,
        "offload_policy": _offload(section),
        "ignored_params": _left_alone(model, mesh, wrapped.ignored) | set(filter(is_whole, model.parameters())),
    }


def _of_experts(options: dict[str, Any], section: DataParallel, wrapped: Wrapped, name: str) -> dict[str, Any]:
    """The arguments of `fully_shard` for a module of experts. If the plan does not name it as a unit, its inputs keep
    their dtypes, as they would without FSDP2: the weights of the routes may be in float32."""
    mesh = wrapped.experts_mesh
    assert mesh is not None, wrapped.experts
    policy = _unit_policy(section)
    if name not in wrapped.units:
        policy = replace(policy, cast_forward_inputs=False)
    placement = placement_over(mesh.size(mesh.ndim - 1))
    return {**options, "mesh": mesh, "mp_policy": policy, "shard_placement_fn": placement}


def _left_alone(model: nn.Module, mesh: DeviceMesh, names: Iterable[str]) -> set[nn.Parameter]:
    """The parameters that FSDP2 does not manage, moved to the mesh's device as FSDP2 moves the others."""
    parameters = {model.get_parameter(name) for name in names}
    for parameter in parameters:
        if not parameter.is_meta and parameter.device.type != mesh.device_type:
            parameter.data = parameter.data.to(mesh.device_type)
    return parameters


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters back: after a forward without a backward FSDP2 leaves gathered ones in the model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshard(section: DataParallel, last: bool) -> bool | int:
    return not last if section.reshard_after_forward == "all_but_last" else section.reshard_after_forward


def dtype_of(section: MixedPrecision | None) -> torch.dtype | None:
    """The dtype to which FSDP2 casts the parameters that it gathers; None: their own."""
    return None if section is None else _dtype(section.param)


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def _policy(section: MixedPrecision | None) -> MixedPrecisionPolicy:
    if section is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(section),
        reduce_dtype=_dtype(section.reduce),
        output_dtype=_dtype(section.output),
        cast_forward_inputs=section.cast_forward_inputs,
    )


def _offload(section: DataParallel) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=section.cpu_offload == "pinned") if section.cpu_offload else OffloadPolicy()


def _unit(model: nn.Module, name: str) -> FSDPModule:
    unit = model.get_submodule(name)
    assert isinstance(unit, FSDPModule), name
    return unit


def _prefetch(model: nn.Module, wrapped: Wrapped, prefetch: Prefetch | None) -> None:
    """Set how many units are gathered ahead. Each unit is gathered with the parts and the experts inside it."""
    if prefetch is None:
        return
    parts = dict.fromkeys((*wrapped.parts, *(name for name in wrapped.experts if name not in wrapped.units)))
    groups = [
        [_unit(model, name) for name in (unit, *(p for p in parts if unit in ancestors(p)))] for unit in wrapped.units
    ]
    for i, (unit, *_) in enumerate(groups):
        if (ahead := prefetch.forward) is not None:
            unit.set_modules_to_forward_prefetch([m for group in groups[i + 1 : i + 1 + ahead] for m in group])
        if (ahead := prefetch.backward) is not None:
            before = [m for group in reversed(groups[max(0, i - ahead) : i]) for m in group]
            # To gather nothing ahead, pass the unit itself, which is already gathered: for an empty list FSDP2 decides itself.
            unit.set_modules_to_backward_prefetch(before or [unit])


def gather_once(model: nn.Module) -> None:
    """Gather the parameters of each unit once, and free them: FSDP2 keeps the tensors that it gathers into, and would otherwise
    make them in the first forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


# Hooks on parameters that FSDP2 shards. Autograd runs the hooks (`register_hook`) of the tensor that gets a gradient: the gathered one.
# FSDP2 sets the gradient of the sharded tensor itself, so a hook on that tensor would never run: registering one is refused.
def refuse_later_hooks(model: nn.Module) -> None:
    """Make `register_hook` of the parameters that FSDP2 shards raise RuntimeError; the message says what to write instead."""
    units = units_of(model.modules())
    sharded = {id(p.sharded_param) for unit in units for found in unit.groups for p in found.group.fsdp_params}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in sharded]
    by_identity = {id(parameter): name for name, parameter in mark_parameters(model, names, _mark).items()}
    # After a forward, the model has the gathered parameters of the root and of units that stay gathered.
    kept = [cast(nn.Module, u.module) for u in units if any(f.after_forward is None for f in u.groups)]
    when_gathered({model, *kept}, lambda parameter: partial(_mark, by_identity[id(parameter)]))


def _mark(name: str, parameter: Tensor) -> None:
    parameter.__dict__["register_hook"] = partial(_refuse, name)


def _refuse(name: str, hook: object) -> NoReturn:
    raise RuntimeError(
        f"register_hook on {name}: FSDP2 sets the gradient of a sharded parameter itself, and the hook would never run. Use "
        "parameter.register_post_accumulate_grad_hook(hook): it is called with the parameter, whose .grad is averaged over the data-parallel "
        "ranks and sharded as the parameter is. Or change .grad between backward and optimizer.step()"
    )
