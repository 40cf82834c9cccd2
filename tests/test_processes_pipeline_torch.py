"""What torch alone does: the reason why zero-bubble schedules are refused with FSDP2 that reshards after forward."""

from __future__ import annotations

import copy

import pytest
import torch
from processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from shardplan.core.schedules import SCHEDULES

STAGES, WIDTH, ROWS = 4, 8, 16


def gradients_are_right(schedule: str, reshard: bool) -> bool:
    """Four stages of torch's own modules on two ranks, FSDP2 over two more: whether every gradient is there and right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    whole = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(STAGES)]
    inputs, wanted = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    hidden = inputs
    for module in whole:
        hidden = module(hidden)
    ((hidden - wanted) ** 2).sum().backward()
    record, stages, parts = SCHEDULES[schedule], [], []
    own = record.stages_of(rank, 2)
    for stage in own:
        part = copy.deepcopy(whole[stage])
        part.zero_grad(set_to_none=True)
        for unit in (part[0], part[2], part):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=reshard and unit is not part)
        parts.append(part)
        stages.append(PipelineStage(part, stage, STAGES, torch.device("cpu"), group=mesh["pp"].get_group()))
    runner = get_schedule_class(record.torch_class)(
        stages, n_microbatches=4, loss_fn=lambda x, y: ((x - y) ** 2).sum() * 2, scale_grads=False
    )
    rows = slice(ROWS // 2 * replica, ROWS // 2 * (replica + 1))
    target = {"target": wanted[rows]} if STAGES - 1 in own else {}
    runner.step(*((inputs[rows],) if 0 in own else ()), **target)
    right = True
    for stage, part in zip(own, parts, strict=True):
        for name, parameter in part.named_parameters():
            expected = whole[stage].get_parameter(name).grad
            gradient = parameter.grad
            if not isinstance(gradient, DTensor):
                right = False  # and no collective: the other ranks of this stage have none either
            else:
                right &= torch.allclose(gradient.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    return right


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_torch_is_wrong_where_fsdp2_reshards(schedule: str) -> None:
    """Where this fails, torch has mended it: `for_stages` may accept `reshard_after_forward` then."""
    assert not all(on_ranks(4, gradients_are_right, schedule, True))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "reshard"), [("zero_bubble", False), ("interleaved", True)])
def test_torch_is_right_otherwise(schedule: str, reshard: bool) -> None:
    assert all(on_ranks(4, gradients_are_right, schedule, reshard))
