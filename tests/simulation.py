"""All ranks of the tp axis in one process, by torch's LocalTensorMode over the process group backend `fake`: another way than
that of the proof, which has a thread for each rank (shardplan/proof/threads.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # it registers the backend
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shardplan.core.module_program import ParameterProgram
from shardplan.proof.compare import Ranked
from shardplan.torchlib.packing import unpack


@contextmanager
def simulated_mesh(tp: int) -> Iterator[DeviceMesh]:
    """A one-dimensional tp mesh whose ranks all live in this process, while the context lasts."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=tp)
    try:
        with LocalTensorMode(tp), _ListsOfNumbers():
            yield init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


class _ListsOfNumbers(TorchFunctionMode):
    """`torch.tensor` of a list of tensors of one number each, which are equal on all ranks; of ranks' own it recurses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor:
            args = tree_map(lambda x: x.tolist() if isinstance(x, LocalTensor) else x, args)
        return func(*args, **(kwargs or {}))


def uneven(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Marks for a model whose vocabulary the ranks split unevenly: GPT-2's."""
    reason = "LocalTensor of torch 2.11 returns no uneven result of a Linear layer without a bias"
    return (pytest.mark.skipif(torch.__version__ < "2.12", reason=reason),) if name == "gpt2" else ()


def on_every_rank(value: Any, tp: int) -> Any:
    """A tensor as each rank's own copy of it; anything else as it is."""
    return LocalTensor({rank: value.clone() for rank in range(tp)}) if isinstance(value, Tensor) else value


def rank_values(value: Any) -> dict[int, Tensor]:
    """What each rank has of a local tensor."""
    return value._local_tensors if isinstance(value, LocalTensor) else {0: value}


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
