"""Lightning's ModelParallelStrategy with a plan in place of styles: Fabric's `parallelize_fn`, and a LightningModule's `configure_model`.
On four processes, against the unsharded model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from small_models import batch, small_model, whole, whole_state
from test_processes_trainers import as_torchrun
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import shardplan
from shardplan.proof.compare import relative_error

pytest.importorskip("lightning_fabric", reason="Lightning is not installed")
pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
RATE, STEPS = 0.5, 3


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What a `parallelize_fn` does: the mesh has the axes data_parallel and tensor_parallel."""
    return shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, prove=False)


def launched() -> None:
    """As torchrun's processes are, which Lightning looks for."""
    as_torchrun()
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": "0"}


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """The mean losses of both shares, and the weights afterwards."""
    model = small_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        total = sum(model(input_ids=batch(step, i), labels=batch(step, i), use_cache=False).loss for i in range(2)) / 2
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, whole_state(model)


def compare(losses: list[float], model: nn.Module) -> None:
    gathered = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(gathered)
    expected, weights = plain()
    assert (gathered / 4).tolist() == pytest.approx(expected, rel=1e-5)
    for name, value in whole_state(model).items():
        assert relative_error(value, weights[name]) <= 1e-5, name


def by_fabric() -> None:
    launched()
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    inner = small_model("llama")
    model = fabric.setup(inner)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=RATE))
    share, losses = strategy.device_mesh["data_parallel"].get_local_rank(), []
    for step in range(STEPS):
        ids = batch(step, share)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss).item())
    compare(losses, inner)


def by_trainer(folder: str) -> None:
    launched()
    import pytorch_lightning as lightning
    from pytorch_lightning.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_model("llama")
            self.losses: list[float] = []

        def configure_model(self) -> None:
            sharded(self.model, self.device_mesh)

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = self.model(input_ids=rows, labels=rows, use_cache=False).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=RATE)

    module = Module()
    share = dist.get_rank() // 2  # the strategy gives the ranks of a tensor-parallel group one share
    rows = DataLoader([batch(step, share) for step in range(STEPS)], batch_size=None)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2),
        max_steps=STEPS,
        use_distributed_sampler=False,
        default_root_dir=folder,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, rows)
    compare(module.losses, module.model)


@pytest.mark.slow
def test_fabric_with_a_plan_trains_as_the_unsharded_model() -> None:
    on_ranks(4, by_fabric)


@pytest.mark.slow
def test_a_lightning_module_with_a_plan_trains_as_the_unsharded_model(tmp_path: Path) -> None:
    on_ranks(4, by_trainer, str(tmp_path))
