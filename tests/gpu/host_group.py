"""A process group for ranks that share one device: gloo moves copies in the host's memory. Gloo alone does not carry out all
collectives on CUDA tensors (torch 2.11 ends with SIGSEGV in all_gather), and NCCL refuses two ranks on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

BACKEND = "host"


class HostGroup(dist.ProcessGroup):
    """Each collective is complete when it returns."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.gloo._set_default_backend(kind)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.gloo._register_backend(torch.device("cpu"), kind, backend)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def barrier(self, opts: Any = None) -> Any:
        self.gloo.barrier().wait()
        return _done([])


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _moved(name: str) -> Callable[..., Any]:
    """A collective of gloo's on copies. Its first argument gets what it computes."""

    def move(self: HostGroup, results: Any, *given: Any) -> Any:
        copies = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), (results, *given))
        getattr(self.gloo, name)(*copies).wait()
        if name != "send":
            with torch.no_grad():
                for tensor, copy in zip(tree_leaves(results), tree_leaves(copies[0]), strict=True):
                    tensor.detach().copy_(copy)
        return _done(results)

    return move


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
):
    setattr(HostGroup, _name, _moved(_name))
dist.Backend.register_backend(BACKEND, HostGroup, devices=["cpu", "cuda"])


def through_the_host() -> None:
    """Put such a group in the place of this process's gloo group. All ranks call it."""
    if dist.get_backend() == BACKEND:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where, 0)
    dist.destroy_process_group()
    method = f"file://{Path(str(where[0])) / 'ranks'}"
    dist.init_process_group(BACKEND, init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=300))
