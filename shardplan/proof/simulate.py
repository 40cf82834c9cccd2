"""All ranks of the tp axis in one process: torch's LocalTensorMode over the process group backend `fake`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardplan.apply.apply import apply_program
from shardplan.apply.mesh import read_mesh
from shardplan.apply.state import packed_parameters
from shardplan.core.program import ParameterProgram
from shardplan.core.report import Comparison
from shardplan.lower.program import Program
from shardplan.torchlib.modes import NothingEmpty
from shardplan.torchlib.packing import unpack
from shardplan.torchlib.private import private

from .child import axis_name
from .compare import Ranked, compare_steps
from .steps import Batch, Steps, run_steps


@contextmanager
def simulated_mesh(tp: int) -> Iterator[DeviceMesh]:
    """A one-dimensional tp mesh whose ranks all live in this process, while the context lasts.

    Raises:
        ValueError: a process group is initialised already.
    """
    if dist.is_initialized():
        raise ValueError("the simulation needs a process group of its own: verify before init_process_group")
    private("fake_pg")
    dist.init_process_group("fake", rank=0, world_size=tp)
    try:
        with private("LocalTensorMode")(tp), _ListsOfNumbers(), NothingEmpty():
            yield init_device_mesh("cpu", (tp,), mesh_dim_names=(axis_name(),))
    finally:
        dist.destroy_process_group()


class _ListsOfNumbers(TorchFunctionMode):
    """`torch.tensor` of a list of tensors of one number each, which are equal on all ranks; of ranks' own it recurses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            local = private("LocalTensor")
            args = private("tree_map")(lambda x: x.tolist() if isinstance(x, local) else x, args)
        return func(*args, **(kwargs or {}))


def on_every_rank(value: Any, tp: int) -> Any:
    """A tensor as each rank's own copy of it; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return private("LocalTensor")({rank: value.clone() for rank in range(tp)})


def rank_values(value: Any) -> dict[int, Tensor]:
    """What each rank has of a local tensor."""
    return value._local_tensors if isinstance(value, private("LocalTensor")) else {0: value}


def whole_values(value: Tensor, packed: ParameterProgram | None = None) -> Ranked:
    """The whole tensor as the ranks have it: for a split DTensor once, put together and unpacked; else each rank's."""
    if not isinstance(value, DTensor):
        return [(f"rank {rank}", x) for rank, x in rank_values(value.detach()).items()]
    parts, placement = rank_values(value.detach()._local_tensor), value.placements[0]
    if not placement.is_shard():
        assert placement.is_replicate(), f"a gradient left as {placement}"
        return [(f"rank {rank}", x) for rank, x in parts.items()]
    ranks = value.device_mesh.size()
    whole = torch.cat([parts[rank] for rank in range(ranks)], dim=placement.dim)
    if packed is not None:
        whole = unpack(whole, packed.dim, packed.parts, ranks)
    return [("all ranks", whole)]


def simulate(
    model: nn.Module, batches: Sequence[Batch], program: Program, reference: Steps
) -> tuple[Comparison, ...]:
    """Apply a program to a model on the CPU, run the steps on every rank, and compare them with the unsharded ones.

    Args:
        model: with the weights of the reference; it is used up.
    """
    tp = program.resolved.sizes.tp
    batches = [private("tree_map")(lambda x: on_every_rank(x, tp), dict(batch)) for batch in batches]
    with simulated_mesh(tp) as mesh:
        apply_program(model, read_mesh(mesh, {"tp": axis_name()}), program, src_data_rank=0)
        _own_buffers(model, tp)
        given = iter(reference.directions)
        outputs = run_steps(model, batches, lambda results: next(given))
    packed = packed_parameters(program)
    gradients = {
        name: whole_values(parameter.grad, packed.get(name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    buffers = {name: whole_values(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    found = [{name: whole_values(value) for name, value in step.items()} for step in outputs]
    return compare_steps(reference, found, gradients, buffers)


def _own_buffers(model: nn.Module, tp: int) -> None:
    """Give each rank its own copy of every buffer, which its forward may change."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = on_every_rank(buffer, tp)
