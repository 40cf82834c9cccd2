"""The form of `fsdp2_strategy_parallelize` in NeMo Automodel's first releases, which published scripts use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

# Its arguments after the mesh, in their order, with their defaults. The axis names are those of the mesh.
OLDER: dict[str, Any] = {
    "param_dtype": torch.bfloat16,
    "mp_policy": None,
    "offload_policy": None,
    "sequence_parallel": False,
    "activation_checkpointing": False,
    "cpu_offload": False,
    "tp_shard_plan": None,
    "dp_mesh_name": None,
    "tp_mesh_name": None,
    "dp_cp_mesh_name": None,
}
# The positional arguments after the mesh, in the older form and today.
PLACES = (
    ("third", torch.dtype, MixedPrecisionPolicy),
    ("fourth", MixedPrecisionPolicy, OffloadPolicy),
    ("fifth", OffloadPolicy, bool),
)
ITS_OWN = ("param_dtype", "dp_mesh_name", "dp_cp_mesh_name")
ITS_AXES = {"data_parallel", "tensor_parallel", "context_parallel", "dp_cp"}


def with_older_form(today: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Let a function take the older form as well. The arguments tell the form: a dtype as the third argument, where today's form
    has a policy; an argument that only one of the forms has; or a mesh with the older axis names.

    Raises (the function):
        ValueError: the arguments belong to different forms.
        TypeError: an argument that its form does not have.
    """
    names = [name for name in inspect.signature(today).parameters if name not in ("model", "device_mesh")]
    new = [name for name in names if name not in OLDER]

    @functools.wraps(today)
    def either(model: nn.Module, device_mesh: Any, *places: Any, **named: Any) -> nn.Module:
        older = [f"{name}=" for name in ITS_OWN if name in named]
        newer = [f"{name}=" for name in named if name in new and name not in ("moe_mesh", "logits")]
        axes = set(device_mesh.mesh_dim_names or ()) & ITS_AXES
        for place, (number, of_older, of_newer) in zip(places, PLACES, strict=False):
            older += [f"a {of_older.__name__} in the {number} place"] if isinstance(place, of_older) else []
            newer += [f"a {of_newer.__name__} in the {number} place"] if isinstance(place, of_newer) else []
        if older and newer:
            raise ValueError(
                f"{' and '.join(older)} belong to the older form (model, device_mesh, param_dtype, mp_policy, offload_policy, ...), "
                f"but {' and '.join(newer)} to today's (model, device_mesh, mp_policy, offload_policy, ...): use one form, with "
                "keyword arguments"
            )
        if places and not older and not newer and len(places) > 1:
            raise ValueError(
                "the third argument is param_dtype in the older form and mp_policy in today's, and None fits both: pass the "
                "arguments after the mesh by keyword"
            )
        if older or (axes and not newer and not places):
            return today(model, device_mesh, **_today(places, named, set(device_mesh.mesh_dim_names or ())))
        return today(model, device_mesh, *places, **named)

    return either


def _today(places: tuple[Any, ...], named: dict[str, Any], axes: set[str]) -> dict[str, Any]:
    """The arguments in today's form."""
    if len(places) > len(OLDER):
        raise TypeError(f"the older form has {len(OLDER)} arguments after the mesh, not {len(places)}")
    given = dict(zip(OLDER, places, strict=False))
    for name in named:
        if name in given:
            raise TypeError(f"{name} was given twice")
        if name not in (*OLDER, "moe_mesh", "logits"):
            raise TypeError(f"the older form of fsdp2_strategy_parallelize has no argument {name!r}")
    values = {**OLDER, **given, **named}
    flat, shards = values.pop("dp_cp_mesh_name"), values.pop("dp_mesh_name")
    tp = values.pop("tp_mesh_name")
    dtype = values.pop("param_dtype")
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError(f"param_dtype must be a dtype, not {dtype!r}")
    if values["mp_policy"] is None:  # a given policy wins
        values["mp_policy"] = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    if values["offload_policy"] is not None:
        values["cpu_offload"] = False  # a given policy wins here too
    names = {"dp_shard_cp_mesh_name": shards if shards is not None else flat, "tp_mesh_name": tp}
    return {
        **values,
        **{name: axis for name, axis in names.items() if axis is not None},
        "enable_fsdp2_prefetch": False,
    }
