"""Models that ask torch for their rank, or communicate by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardplan
from shardplan.model.distributed_code import asked_in, asking
from tests.processes import on_ranks
from tests.test_init_idioms import WIDTH, hidden


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Constructor(Mlp):
    """soft-moe-pytorch: the experts are distributed over the world where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1


class Forward(Mlp):
    """The contrastive loss of FLAVA."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            x = torch.cat(torch.distributed.nn.functional.all_gather(x))
        return super().forward(x)


class Imported(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.sign()

    def sign(self) -> int:
        return own_sign()


def own_sign() -> int:
    return (lambda: -1 if dist.is_initialized() and get_rank() else 1)()


class Inherited(Constructor):
    def __init__(self) -> None:
        super().__init__()
        self.more = 1


class Silent(Mlp):
    """It knows DTensor, has names of torch's functions, and asks in code that its forward does not call."""

    distributed = False

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(x, DTensor) and not self.distributed and torch.is_tensor(x)
        return self.gather(super().forward(x))

    def gather(self, x: Tensor) -> Tensor:
        return x.gather(-1, torch.arange(WIDTH).expand_as(x))

    def synchronize(self) -> None:
        dist.barrier()


class World(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.group = dist.group.WORLD


class Unnamed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.group = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        return x * dist.get_rank(self.group) + dist.get_world_size(group=None)


class Named(Unnamed):
    """torchtitan's embedding: code for a group that nobody has given."""

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        dist.all_reduce(x, group=self.group)
        return x * dist.get_rank(self.group) + dist.get_world_size(group=self.group)


ASKING: dict[type[nn.Module], str] = {
    Constructor: "self.distributed = dist.is_initialized() and dist.get_world_size() > 1",
    Inherited: "self.distributed = dist.is_initialized() and dist.get_world_size() > 1",
    Forward: "if torch.distributed.is_available() and torch.distributed.is_initialized():",
    Imported: "return (lambda: -1 if dist.is_initialized() and get_rank() else 1)()",
    World: "self.group = dist.group.WORLD",
    Unnamed: "return x * dist.get_rank(self.group) + dist.get_world_size(group=None)",
}


@pytest.mark.parametrize("form", ASKING)
def test_the_line_is_named(form: type[nn.Module]) -> None:
    found = asked_in(form)
    assert found is not None and found.startswith("test_distributed_code.py:") and found.endswith(f"`{ASKING[form]}`")


@pytest.mark.parametrize(
    "module", [Silent, Named, partial(nn.SyncBatchNorm, 4), partial(nn.TransformerEncoderLayer, 8, 2)]
)
def test_what_does_not_ask(module: Callable[[], nn.Module]) -> None:
    assert not list(asking(nn.ModuleList([module()])))


class Model(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("form", [Constructor, Forward])
def test_what_asks_is_not_proven(form: type[nn.Module]) -> None:
    model = shardplan.Model(Model(Mlp(), form(), form()), inputs=hidden)
    rules = {"*.up": "colwise", "*.down": "rowwise"}
    plan = {"version": "1", "name": "own", "tensor_parallel": rules}
    report = shardplan.validate(model, plan, {"tp": 2})
    asked = [one for one in report.errors if one.code == "SP425"]
    assert len(asked) == 1 and ASKING[form] in asked[0].notes[0] and "--allow-unproven" in (asked[0].help or "")
    allowed = shardplan.validate(model, plan, {"tp": 2}, allow_unproven=True)
    assert [one.is_error for one in allowed.diagnostics if one.code == "SP425"] == [False]
    silent = shardplan.validate(shardplan.Model(Model(Mlp(), Silent()), inputs=hidden), plan, {"tp": 2})
    assert not any(one.code == "SP425" for one in silent.diagnostics)


def codes_of_a_group() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Model(Mlp(), Named(), Named())
    model[2].group = mesh.get_group()
    plan = {"version": "1", "name": "own", "tensor_parallel": {"*.up": "colwise", "*.down": "rowwise"}}
    with pytest.raises(shardplan.PlanError) as refused:
        shardplan.apply_plan(shardplan.Model(model, inputs=hidden), mesh, plan)
    return [one.code for one in refused.value.diagnostics]


def test_a_module_that_has_its_group_is_not_proven() -> None:
    assert on_ranks(2, codes_of_a_group, seconds=100.0) == [["SP524"]] * 2  # no copy of the model has it
