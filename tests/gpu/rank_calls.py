"""What `several_processes` calls on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardplan
from shardplan.torchlib.private import private

from .cases import Case, exactly, judged, of_dtype, options_of, planned_step, precisions, references, stored
from .host_group import through_the_host


def row_of_rank(case: Case, device: str) -> dict[str, Any]:
    """One rank's row; what is wrong on some rank runs again on all of them, in float64."""
    _begin(device)
    through_the_host()
    row: dict[str, Any] = {}
    for dtype in precisions(case):
        mesh = shardplan.build_mesh(dp_shard=case.dp_shard, cp=case.cp, tp=case.tp, ep=case.ep, device_type=device)
        model = of_dtype(case.model, stored(case, dtype), device)
        shardplan.apply_plan(model, mesh, case.plan, src_data_rank=None, prove=False, **options_of(case, dtype))
        run = planned_step(case, model, shardplan.applied(model).program, mesh, device)
        exact, plain = references(case, dtype, device, mesh.get_local_rank("dp_shard"))
        row = judged(case, run, exact, plain)
        row["compared in"] = str(exact.loss.dtype).removeprefix("torch.")
        right: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(right, row["ok"])
        if all(right):
            break
    return row


def _begin(device: str) -> None:
    exactly()
    if device == "cuda":
        torch.cuda.set_device(0)


def _all_reduce(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return private("all_reduce")(x, "sum", dist.group.WORLD), torch.full_like(x, 3.0)


def _all_gather(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    expected = torch.cat([torch.full_like(x, 1.0), torch.full_like(x, 2.0)])
    return private("all_gather")(x, 0, dist.group.WORLD), expected


def _reduce_scatter(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    return private("reduce_scatter")(x, "sum", 0, dist.group.WORLD), torch.full_like(x[: len(x) // 2], 3.0)


def _reduce_scatter_mean(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(x[: len(x) // 2])
    dist.reduce_scatter_tensor(result, x, op=dist.ReduceOp.AVG)
    return result, torch.full_like(result, 1.5)


def _all_to_all(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x)
    half = len(x) // 2
    return result, torch.cat([torch.full_like(x[:half], 1.0), torch.full_like(x[half:], 2.0)])


def _broadcast(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    result = x.clone()
    dist.broadcast(result, 0)
    return result, torch.full_like(x, 1.0)


def _scatter(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(x)
    dist.scatter(result, [x, x + 1] if rank == 0 else None, 0)
    return result, torch.full_like(x, 1.0 + rank)


def _send(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    if rank == 0:
        dist.send(x, 1)
        return x, torch.full_like(x, 1.0)
    result = torch.empty_like(x)
    dist.recv(result, 0)
    return result, torch.full_like(x, 1.0)


# Of a tensor that holds the rank's number, counted from 1: -> (the result, what it must be). Those that plans need, first.
COLLECTIVES: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter of a mean": _reduce_scatter_mean,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "send": _send,
}


def collective(name: str, device: str) -> None:
    """One collective, in float32 and bfloat16."""
    _begin(device)
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        result, expected = COLLECTIVES[name](torch.full((4, 3), rank + 1.0, dtype=dtype, device=device), rank)
        assert torch.equal(result.cpu(), expected.cpu()), (name, dtype, result, expected)
