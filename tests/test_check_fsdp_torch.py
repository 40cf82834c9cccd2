"""What FSDP2 accepts and refuses on dim 0, so that the checks say neither more nor less
(docs/decisions/0015)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing import start_processes


def _train(rank: int, rows: int, tp: int, dp: int, folder: str) -> None:
    """One step of a table of [rows, 4] that tp splits in ceil-chunks; writes what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=tp * dp)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp_shard", "tp"))
    start = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4) / 10

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(start, mesh["tp"], [Shard(0)]))

        def forward(self) -> torch.Tensor:
            return (self.weight.to_local() ** 2).sum() / 2  # the gradient is the weight itself

    try:
        table = fully_shard(Table(), mesh=mesh["dp_shard"])
        table().backward()
        facts = [torch.equal(table.weight.grad.full_tensor(), start)]
        torch.optim.SGD(table.parameters(), lr=0.5).step()
        facts.append(torch.equal(table.weight.full_tensor(), start / 2))
        state = {"table": table.state_dict()}
        dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
        with torch.no_grad():
            table.weight.to_local().zero_()
        dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
        facts.append(torch.equal(table.weight.full_tensor(), start / 2))
        said = "right" if all(facts) else f"wrong: {facts}"
    except RuntimeError as error:
        said = str(error)
    Path(folder, f"rank{rank}").write_text(said)
    os._exit(0)  # a rank that failed leaves the others waiting in a collective: none of them cleans up


def _outcome(rows: int, tp: int, dp: int) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_train, (rows, tp, dp, folder), nprocs=tp * dp, start_method="fork")
        return {path.read_text() for path in Path(folder).glob("rank*")}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tp", "dp"), [(5, 2, 2)])
def test_uneven_shards_of_dim_0_are_right_under_fsdp2(rows: int, tp: int, dp: int):
    assert _outcome(rows, tp, dp) == {"right"}


@pytest.mark.slow
def test_an_empty_tp_shard_is_refused_by_fsdp2():
    assert any("expects non-empty tensor" in said for said in _outcome(9, 4, 1))
