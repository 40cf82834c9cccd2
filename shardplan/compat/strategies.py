"""The functions of NeMo Automodel's (0.7.0) and NeMo-RL's parallelizers, under their names and with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from shardplan.runtime.parallel.process_groups import root_of
from shardplan.runtime.training import unshard

from .configs import Checkpointing, FSDP2Config, MegatronFSDPConfig
from .managers import refuse_optimizer
from .mesh_context import get_model_parallelizer
from .multimodal import FrozenSharding, MultimodalDistributedConfig, check_frozen, frozen_towers
from .older_forms import with_older_form
from .parallelize import AnyPlan, Logits, axes_of, parallelize


@with_older_form
def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: Checkpointing = False,
    tp_shard_plan: AnyPlan | None = None,
    dp_replicate_mesh_name: str = "dp_replicate",
    dp_shard_cp_mesh_name: str = "dp_shard_cp",
    tp_mesh_name: str = "tp",
    enable_async_tensor_parallel: bool = False,
    enable_compile: bool = False,
    enable_fsdp2_prefetch: bool = True,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    reshard_after_forward: bool | None = None,
    activation_checkpointing_scope: str | list[str] | tuple[str, ...] | None = "all",
    frozen_multimodal_sharding: FrozenSharding = "root",
    reapply_trainability: Callable[[nn.Module], None] | None = None,
    *,
    cpu_offload: bool = False,
    moe_mesh: DeviceMesh | None = None,
    logits: Logits | None = None,
) -> nn.Module:
    """Apply a plan with FSDP2.

    It also takes the older form, (model, device_mesh, param_dtype, mp_policy, offload_policy, ...): see `older_forms`.

    Args:
        device_mesh: as for `apply_plan`, or with the given axis names. Flattened axes are resolved from the mesh's axes.
        mp_policy: FSDP2's dtypes; None is the plan's dtypes, else the model's.
        tp_shard_plan: None is the built-in plan for the model. Else a plan of shardplan's; "hf"; a dictionary from names to
            styles, or the import path of one or of a function that returns one.
        frozen_multimodal_sharding: "replicate" stores frozen parameters whole on every rank; else the plan decides.
        reapply_trainability: called with the model before the plan is applied; it sets `requires_grad` of parameters.
        cpu_offload: the same as a CPUOffloadPolicy without pinned memory.
        moe_mesh: the axes (ep_shard, ep) over the mesh's ranks; None is no expert parallelism.
        logits: as for `apply_plan`. None: a causal language model returns logits split over the vocabulary, where the plan
            splits its head and is not the caller's own.

    The other arguments are fields of `FSDP2Config`.

    Raises:
        ValueError, TypeError: a wrong argument. PlanError, RuntimeError: as `apply_plan`.
    """
    check_frozen(frozen_multimodal_sharding, "frozen_multimodal_sharding")
    if cpu_offload and offload_policy is not None:
        raise ValueError("cpu_offload and offload_policy were given: give one of them")
    offload_policy = CPUOffloadPolicy(pin_memory=False) if cpu_offload else offload_policy
    config = FSDP2Config(
        sequence_parallel=sequence_parallel,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        activation_checkpointing=activation_checkpointing,
        activation_checkpointing_scope=activation_checkpointing_scope,
        reshard_after_forward=reshard_after_forward,
        enable_async_tensor_parallel=enable_async_tensor_parallel,
        enable_compile=enable_compile,
        enable_fsdp2_prefetch=enable_fsdp2_prefetch,
        fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
        fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
        multimodal=MultimodalDistributedConfig(frozen_multimodal_sharding),
    )
    names = {"dp_replicate": dp_replicate_mesh_name, "dp_shard": dp_shard_cp_mesh_name, "tp": tp_mesh_name}
    axes = axes_of(device_mesh, **names)
    return parallelize(model, device_mesh, config, tp_shard_plan, axes, moe_mesh, logits, reapply_trainability)


def _parallelize_model(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    param_dtype: torch.dtype,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    custom_parallel_plan: AnyPlan | None = None,
    *,
    logits: Logits | None = None,
) -> nn.Module:
    """Apply a plan with FSDP2, on a data-parallel and a tensor-parallel mesh, as NeMo-RL's `_parallelize_model` does.

    Args:
        dp_mesh, tp_mesh: slices of one mesh, which together make up the whole mesh; dp_mesh may have several axes, or be flat.
        param_dtype: layers compute in it; gradients are reduced and results returned in float32.
        custom_parallel_plan, logits: as `tp_shard_plan` and `logits` of `fsdp2_strategy_parallelize`.

    Raises:
        ValueError: meshes that are not slices of one mesh, or leave ranks out.
    """
    mesh = root_of(tp_mesh)
    if root_of(dp_mesh) is not mesh or dp_mesh.size() * tp_mesh.size() != mesh.size():
        raise ValueError(
            f"dp_mesh ({dp_mesh.size()} ranks) and tp_mesh ({tp_mesh.size()}) must be slices of one mesh, and make it "
            'up together: mesh["dp"] and mesh["tp"] of init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))'
        )
    assert dp_mesh.mesh_dim_names is not None and tp_mesh.mesh_dim_names is not None  # slices are taken by name
    return fsdp2_strategy_parallelize(
        model,
        mesh,
        logits=logits,
        sequence_parallel=sequence_parallel,
        activation_checkpointing=activation_checkpointing,
        tp_shard_plan=custom_parallel_plan,
        tp_mesh_name=tp_mesh.mesh_dim_names[0],
        enable_fsdp2_prefetch=False,
        mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32),
        cpu_offload=cpu_offload,
        dp_shard_cp_mesh_name=dp_mesh.mesh_dim_names[0] if dp_mesh.ndim == 1 else "dp_shard_cp",
    )


def parallelize_model(model: nn.Module, mesh_context: Any = None, *places: Any, **named: Any) -> nn.Module:
    """Two functions under one name. With a context, it is NeMo Automodel 0.7's `parallelize_model(model, mesh_context)`, which calls
    the `parallelizer` of the model's class, else `ModelParallelizer`. With meshes instead, it is `_parallelize_model`.

    Raises:
        TypeError: the arguments fit neither function. Also the errors of the two functions.
    """
    if isinstance(mesh_context, DeviceMesh) or "dp_mesh" in named:
        return _parallelize_model(model, *(() if mesh_context is None else (mesh_context,)), *places, **named)
    logits = named.pop("logits", None)
    if places or named:
        raise TypeError(
            "parallelize_model takes (model, mesh_context) or (model, dp_mesh, tp_mesh, param_dtype, ...), and the second argument is "
            f"{mesh_context!r}" + "".join(f", with {name}=" for name in named)
        )
    return get_model_parallelizer(model).parallelize(
        model, mesh_context, **({} if logits is None else {"logits": logits})
    )


# Older spellings of NeMo Automodel (nvFSDP) -> today's.
OLDER = {
    "nvfsdp_unit_modules": "megatron_fsdp_unit_modules",
    "fsdp_unit_modules": "megatron_fsdp_unit_modules",
    "data_parallel_sharding_strategy": "zero_dp_strategy",
    "init_nvfsdp_with_meta_device": "init_fsdp_with_meta_device",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
    "dp_mesh_name": "dp_shard_dim",
    "tp_mesh_name": "tp_dim",
}


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    megatron_fsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: AnyPlan | None = None,
    zero_dp_strategy: int | str = 3,
    init_fsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_shard_dim: str = "dp",
    tp_dim: str = "tp",
    reapply_trainability: Callable[[nn.Module], None] | None = None,
    *,
    logits: Logits | None = None,
    **older: Any,
) -> nn.Module:
    """Apply a plan with Megatron-FSDP. Returns the model, never a pair.

    Args:
        optimizer: must be None: make it afterwards and wrap it with `applied(model).wrap_optimizer`.
        tp_shard_plan, reapply_trainability, logits: as for `fsdp2_strategy_parallelize`.
        dp_shard_dim, tp_dim: names of the mesh's axes.
        older: the same arguments under older names (`OLDER`), and `cp_mesh_name`.

    The other arguments are fields of `MegatronFSDPConfig`.

    Raises:
        ValueError, TypeError: a wrong argument. PlanError, RuntimeError: as `apply_plan`.
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "device_mesh", "older")}
    for name in older:
        if name != "cp_mesh_name" and name not in OLDER:
            raise TypeError(f"megatron_fsdp_strategy_parallelize() has no argument {name!r}")
    given |= {OLDER[name]: value for name, value in older.items() if name in OLDER}
    given = {name: value for name, value in given.items() if name not in ("logits", "reapply_trainability")}
    refuse_optimizer(given.pop("optimizer"))
    plan = given.pop("tp_shard_plan")
    names = {"dp_shard": given.pop("dp_shard_dim"), "tp": given.pop("tp_dim")}
    names |= {"cp": older["cp_mesh_name"]} if "cp_mesh_name" in older else {}
    config, axes = MegatronFSDPConfig(**given), axes_of(device_mesh, **names)
    return parallelize(model, device_mesh, config, plan, axes, logits=logits, reapply_trainability=reapply_trainability)


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: AnyPlan | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = "dp",
    cp_mesh_name: str = "cp",
    tp_mesh_name: str = "tp",
    *,
    logits: Logits | None = None,
) -> nn.Module:
    """`megatron_fsdp_strategy_parallelize` under the name and with the arguments of older releases.

    Args:
        data_parallel_sharding_strategy: "optim_grads_params", or one of the backend's other words. "params" and "grads_params"
            are the same as "optim_grads_params": the backend shards parameters together with gradients and optimizer state.
        dp_mesh_name, cp_mesh_name, tp_mesh_name: names of the mesh's axes.

    Raises:
        ValueError, TypeError: a wrong argument. PlanError, RuntimeError: as `apply_plan`.
    """
    given = dict(locals())
    strategy = given["data_parallel_sharding_strategy"]
    given["data_parallel_sharding_strategy"] = PARAMETERS.get(strategy, strategy)
    return megatron_fsdp_strategy_parallelize(**given)


PARAMETERS = {"params": "optim_grads_params", "grads_params": "optim_grads_params"}


def apply_fsdp2_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
    enable_fsdp2_prefetch: bool = True,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    reshard_after_forward: bool | None = None,
    fully_shard_fn: Callable[..., Any] | None = None,
    frozen_multimodal_sharding: FrozenSharding = "root",
    ignored_multimodal_params: set[nn.Parameter] | None = None,
) -> None:
    """Make an FSDP2 unit of each element of all (innermost) lists and dictionaries of modules. The caller makes the unit of the
    root.

    Args:
        mesh: only the data-parallel mesh: one axis, or replicas and shards.
        reshard_after_forward: None means all units but the last.
        fully_shard_fn: called instead of torch's `fully_shard`.
        frozen_multimodal_sharding: for wholly frozen layers of vision and audio towers. "root": they are not units, so the
            caller's root holds them. "per_layer": they are units like all others. "replicate": FSDP2 ignores their parameters;
            pass these as `ignored_params` to the root too.
        ignored_multimodal_params: parameters that FSDP2 does not manage; pass them as `ignored_params` to the root too.
    """
    check_frozen(frozen_multimodal_sharding, "frozen_multimodal_sharding")
    units = list(_elements(module))
    frozen = frozen_towers(module, units) if frozen_multimodal_sharding != "per_layer" else []
    ignored = {id(parameter) for parameter in ignored_multimodal_params or ()}
    if frozen_multimodal_sharding == "replicate":
        ignored |= {id(parameter) for name in frozen for parameter in module.get_submodule(name).parameters()}
    config = FSDP2Config(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        enable_fsdp2_prefetch=enable_fsdp2_prefetch,
        fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
        fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
        reshard_after_forward=reshard_after_forward,
    )
    left_alone = {p for p in module.parameters() if id(p) in ignored}
    for parameter in left_alone:  # on the device where FSDP2 would put them
        if not parameter.is_meta and parameter.device.type != mesh.device_type:
            parameter.data = parameter.data.to(mesh.device_type)
    sharded = [module.get_submodule(name) for name in units if name not in frozen]
    for number, unit in enumerate(sharded, 1):
        (fully_shard_fn or fully_shard)(
            unit,
            mesh=mesh,
            reshard_after_forward=number < len(sharded) if reshard_after_forward is None else reshard_after_forward,
            # A unit returns its compute dtype: the model's output dtype would meet parameters of another dtype.
            mp_policy=replace(config.mp_policy or MixedPrecisionPolicy(), output_dtype=None),
            offload_policy=config.offload_policy or OffloadPolicy(),
            ignored_params=left_alone | {p for p in unit.parameters() if not p.ndim},  # FSDP2 shards no scalars
        )
        if isinstance(
            unit, FSDPModule
        ):  # transformers finds recorded outputs by the class's qualified name, which FSDP2 changes
            own, original = type(unit), type(unit).__bases__[-1]
            own.__module__, own.__qualname__ = original.__module__, original.__qualname__
    if enable_fsdp2_prefetch:
        _prefetch(sharded, fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth)


def _prefetch(units: list[Any], forward: int, backward: int) -> None:
    """Set how many units each unit gathers ahead."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + forward])
        # To gather nothing ahead, give the unit itself, which is already gathered: for an empty list FSDP2 uses its own order.
        unit.set_modules_to_backward_prefetch(units[max(0, i - backward) : i][::-1] or [unit])


apply_fsdp_sharding_recursively = apply_fsdp2_sharding_recursively  # its name in older releases


CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _elements(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield full
        else:
            yield from _elements(child, f"{full}.")


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """`shardplan.unshard`, for log-probability inference."""
    with unshard(model):
        yield
