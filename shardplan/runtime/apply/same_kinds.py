"""Whether the data-parallel ranks get the same kinds of inputs: with an image on one rank and only text on another, FSDP2 gathers the
vision tower, and reduces its gradients, on the first rank alone."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardplan.core.by_key import by_key
from shardplan.core.mesh import APPLIED, DATA_PARALLEL
from shardplan.runtime.parallel.fsdp_units import groups_in
from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.torchlib.gathering import of_all

from .agreement import least
from .same_inputs import in_a_graph, named_arguments
from .watched import Looks, Watched


def same_kinds(watched: Watched) -> Looks:
    """Compare over all ranks, before each forward that FSDP2 gathers parameters for, which arguments are floating-point tensors or
    lists of them; masks, token ids and positions may differ. It costs one all-reduce of two integers for each axis of the mesh, for
    which the process waits. It skips models with one kind of input, and other backends.

    RuntimeError on all ranks names the arguments and the ranks, before any part of the model runs.
    """
    model, mesh = watched.outer, watched.mesh
    meshes = {axis: mesh.axes[axis] for axis in APPLIED if axis in mesh.axes}
    split = any(meshes[axis].size() > 1 for axis in meshes.keys() & set(DATA_PARALLEL))
    if not isinstance(model, FSDPModule) or not split or not _takes_several_kinds(watched.inner):
        return {}
    # tp ranks compare too: if they got different batches, some data-parallel groups would raise and others go on.
    axes = [one for one in meshes.values() if one.size() > 1]
    groups = groups_in(model.modules())

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = named_arguments(args, kwargs)
        if in_a_graph({name: x for name, x in given.items() if isinstance(x, Tensor)}):
            return
        # Ranks that gathered the whole model beforehand may each run it any number of times.
        if torch.is_grad_enabled() or not all(group.is_unsharded for group in groups):
            _compare(tuple(name for name, x in given.items() if _is_features(x)), axes)

    return {model: look}


def _takes_several_kinds(model: nn.Module) -> bool:
    """Whether one forward may leave out an input that another has. transformers' classes say which kinds they take; any other model
    counts if it has an optional argument."""
    kinds = getattr(model, "input_modalities", None)
    if kinds is not None:
        return not isinstance(kinds, str) and len(kinds) > 1
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(p.default is None or p.kind is p.VAR_KEYWORD for p in parameters)


def _is_features(x: Any) -> bool:
    if isinstance(x, list | tuple):
        return any(map(_is_features, x))
    return isinstance(x, Tensor) and x.is_floating_point()


def _compare(names: tuple[str, ...], axes: Sequence[DeviceMesh]) -> None:
    number = int.from_bytes(hashlib.sha256(" ".join(names).encode()).digest()[:7], "big")
    numbers = [number, -number]
    for axis in axes:
        numbers = least(numbers, axis)
    if numbers[0] == -numbers[1]:  # the same on all ranks
        return
    by_rank = {dist.get_rank(): names}
    for axis in axes:
        by_rank = {rank: those for box in of_all(by_rank, axis.get_group()) for rank, those in box.items()}
    raise RuntimeError(_message(by_rank))


def _message(by_rank: Mapping[int, tuple[str, ...]]) -> str:
    ranks = by_key((names, rank) for rank, names in sorted(by_rank.items()))
    common = set.intersection(*map(set, ranks))
    listed = [
        f"{named_ranks(those, ('was given', 'were given'))} "
        f"{', '.join(name for name in names if name not in common) or 'none of them'}"
        for names, those in ranks.items()
    ]
    return (
        f"ranks need the same kinds of inputs in each forward, but {'; '.join(listed)}. FSDP2 gathers the modules that read an "
        "input, and reduces their gradients, on all ranks or on none. Where a batch has no image, pass a blank one (zeros) that no "
        "token reads: append its image tokens after the text, with attention_mask 0 and labels -100. Do likewise for other inputs"
    )
