"""`unshard`: many forwards with one gather per unit, and the model as it was afterwards, in four processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import on_ranks
from small_models import batch, share_of, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.parallel.fsdp_units import groups_of
from shardplan.runtime.training import log_probabilities, unshard
from tests.collective_counter import CollectiveCounter

LIMIT = TOLERANCE[torch.float64]


def sharded(model: nn.Module) -> bool:
    """Whether every parameter is held in parts over the data-parallel axis."""
    return all(isinstance(p, DTensor) and p.device_mesh.mesh_dim_names[0] != "tp" for p in model.parameters())


def gathered(model: nn.Module) -> bool:
    return not any(isinstance(p, DTensor) and "dp_shard" in p.device_mesh.mesh_dim_names for p in model.parameters())


def state_of(model: nn.Module) -> list[Any]:
    """All that FSDP2 and torch keep about how a model runs."""
    found: list[Any] = [module.training for module in model.modules()]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found += [state._training_state, state._state_ctx.iter_forward_root, state._is_root]
            for group in groups_of(state):
                found += [group._training_state, group._sharded_state, group.post_forward_mesh_info]
    return found


class Gathers(CollectiveCounter):
    """Counts the gathers of FSDP2 alone: those of sequence parallelism are functional collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.name().startswith("c10d::_allgather_base_"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class Recipe:
    """A planned model and what it is called with; `reference` is the same unsharded."""

    def __init__(self, sizes: dict[str, int], reshard: bool | int | str):
        self.mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.share = share_of(self.mesh)[0]
        self.model = shardplan.apply_plan(
            small_model("llama", dtype=torch.float64), self.mesh, "auto", sequence_parallel=True, logits="sharded",
            data_parallel={"reshard_after_forward": reshard}, prove=False,
        )  # fmt: skip
        self.reference = small_model("llama", dtype=torch.float64)

    def logs(self, model: nn.Module, step: int) -> Tensor:
        ids = batch(step, self.share)
        return log_probabilities(model(input_ids=ids, use_cache=False).logits, ids, shift=True)

    def check_logs(self, step: int) -> None:
        with torch.no_grad():
            assert relative_error(self.logs(self.model, step), self.logs(self.reference, step)) <= LIMIT

    def check_training(self, step: int, shares: int, *, evaluating: bool = False) -> None:
        """One step of both, equal afterwards; `evaluating`: with a forward without gradients in front of the optimizer's step."""
        self.logs(self.model, step).mean().backward()
        for share in range(shares):
            ids = batch(step, share)
            (log_probabilities(self.reference(input_ids=ids).logits, ids, shift=True).mean() / shares).backward()
        for (name, own), other in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            assert relative_error(whole(own.grad), other.grad) <= LIMIT, name
        if evaluating:
            with torch.no_grad(), unshard(self.model):
                self.logs(self.model, step)
        for model in (self.model, self.reference):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


def inference_between_steps(sizes: dict[str, int], reshard: bool | int | str, first: bool) -> bool:
    recipe = Recipe(sizes, reshard)
    model, shares = recipe.model, 4 // sizes.get("tp", 1)
    if not first:
        recipe.check_training(0, shares)
    before = state_of(model)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())

    with torch.inference_mode(), Gathers() as counter, unshard(model) as same:
        assert same is model and gathered(model)
        for step in range(3):
            recipe.check_logs(step)
            assert gathered(model), "a forward shards nothing"
    assert counter.counts == {"all_gather": units}
    assert sharded(model)
    if not first:  # the first forward of all tells FSDP2 which unit is the root
        assert state_of(model) == before

    # The optimizer's step is seen by the next one; and a forward outside behaves as if nothing had been.
    recipe.check_training(1, shares, evaluating=True)
    with unshard(model):
        recipe.check_logs(2)
    recipe.check_logs(3)
    other = Recipe(sizes, reshard)
    other.check_logs(3)
    assert [type(s) for s in state_of(model)] == [type(s) for s in state_of(other.model)]
    for own, fresh in zip(model.modules(), other.model.modules(), strict=True):
        if isinstance(own, FSDPModule):
            groups = (groups_of(module._get_fsdp_state()) for module in (own, fresh))
            for a, b in zip(*groups, strict=True):
                assert (a.post_forward_mesh_info is None) == (b.post_forward_mesh_info is None)
                assert a._sharded_state == b._sharded_state

    # Between forward and backward of a training step.
    loss = recipe.logs(model, 4).mean()
    with torch.no_grad(), unshard(model):
        recipe.check_logs(2)
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    recipe.logs(model, 4).mean().backward()
    assert all(torch.equal(whole(a), whole(p.grad)) for a, p in zip(wanted, model.parameters(), strict=True))
    return True


def nested_and_broken() -> bool:
    recipe = Recipe({"dp_shard": 2, "tp": 2}, True)
    model = recipe.model.eval()
    recipe.check_logs(0)
    before = state_of(model)
    with torch.no_grad(), unshard(model):
        inner = state_of(model)
        with unshard(model):
            recipe.check_logs(1)
        assert state_of(model) == inner and gathered(model), "the inner one leaves what the outer one gathered"
        with pytest.raises(KeyError), unshard(model.model.layers[0]):
            raise KeyError
        assert state_of(model) == inner
        recipe.check_logs(1)
    assert state_of(model) == before and not model.training

    # One unit that was gathered by hand stays so.
    model.model.layers[0].unshard()
    before = state_of(model)
    with unshard(model):
        pass
    assert state_of(model) == before
    model.model.layers[0].reshard()

    before = state_of(model)
    failing = patch.object(type(model.model.layers[1].mlp.act_fn), "forward", side_effect=KeyError("in the middle"))
    with failing, pytest.raises(KeyError, match="in the middle"), torch.no_grad(), unshard(model):
        recipe.check_logs(0)
    assert state_of(model) == before
    recipe.check_logs(0)
    with torch.no_grad(), unshard(model):
        recipe.check_logs(1)
    recipe.check_training(2, 2)
    recipe.check_logs(3)
    return True


def evaluated_in_front_of_a_step() -> bool:
    """A forward without gradients leaves units gathered; the next step and the next forward have the shards all the same."""
    recipe = Recipe({"dp_shard": 2, "tp": 2}, "all_but_last")
    model, models = recipe.model, (recipe.model, recipe.reference)
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    for step, around in enumerate((nullcontext, unshard)):
        for share in range(2):
            ids = batch(step, share)
            (log_probabilities(recipe.reference(input_ids=ids).logits, ids, shift=True).mean() / 2).backward()
        recipe.logs(model, step).mean().backward()
        with torch.no_grad(), around(model):
            recipe.check_logs(step)
            assert not sharded(model)
            late = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(ValueError, match="created after a forward without gradients, which left .* gathered"):
                late.step()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
            recipe.check_logs(step + 1)
    changed = {name: parameter * 1.1 for name, parameter in model.named_parameters()}
    before = [whole(p).clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"in the place of the parameter model\.\S+ .* FSDP2 would compute with its own"
    ):
        torch.func.functional_call(model, changed, (), {"input_ids": batch(0)})
    assert all(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))
    recipe.check_training(3, 2)
    recipe.check_logs(4)
    return True


def plain_models() -> bool:
    """FSDP2 without a plan: grouped modules, CPU offload is torch's; and what is refused."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.Linear(3, 5))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    expected = model(x).detach()
    fully_shard([model[0], model[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad(), unshard(nn.Sequential(model)):
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)
    assert all(p.placements == (Shard(0),) for p in model.parameters())
    with pytest.raises(ValueError, match="no FSDP2 unit"), unshard(nn.Linear(2, 2)):
        pass
    with pytest.raises(TypeError, match="must be a torch Module, not list"), unshard([model]):
        pass
    return True


def on_all_ranks() -> bool:
    return all([
        inference_between_steps({"dp_shard": 2, "tp": 2}, True, False),
        inference_between_steps({"dp_replicate": 2, "dp_shard": 2}, True, True),
        nested_and_broken(),
        evaluated_in_front_of_a_step(),
        plain_models(),
    ])  # fmt: skip


@pytest.mark.slow
def test_unshard():
    assert on_ranks(4, on_all_ranks, seconds=300) == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [False, 2, "all_but_last"])
def test_unshard_with_other_ways_to_reshard(reshard: bool | int | str):
    assert on_ranks(4, inference_between_steps, {"dp_shard": 4}, reshard, reshard == "all_but_last") == [True] * 4
