"""Float8 training of torchao beneath a plan: converted first, then applied. Four processes, against the unsharded model.

A model in float8 cannot equal one in float32. How far it is off without a plan is its own error, and the limit is twice that,
for each gradient. Row by row the scales are powers of two of values that a split does not change much: there the numbers are those of the unsharded float8
model. One scale for a whole tensor becomes one for each rank's part of it.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.model.build_tree import tree_of

pytest.importorskip("torchao", reason="the extra `float8` is not installed")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def in_float8(model: nn.Module, recipe: str, **options: bool) -> nn.Module:
    """All matrices but the head's, emulated: the CPU has no products of float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")


def distance(value: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm of the reference."""
    return ((value - reference).norm() / reference.norm()).item()


def unsharded(model: nn.Module, share: int) -> dict[str, Tensor]:
    """Loss, logits and mean gradients over two batches; `share` is the number of this rank's."""
    found = {}
    for other in range(2):
        result = model(input_ids=batch(other), labels=batch(other), use_cache=False)
        (result.loss / 2).backward()
        if other == share:
            found = {"loss": result.loss.detach(), "logits": result.logits.detach()}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


def train(recipe: str, options: dict) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    share = mesh.get_local_rank("dp_shard")
    model = in_float8(small_model("llama"), recipe)
    shardplan.apply_plan(model, mesh, "auto", **options)  # with its proof, on a model without float8
    assert (
        str(shardplan.applied(model)).count("proven")
        and type(model.model.layers[0].mlp.up_proj).__name__ == "Float8Linear"
    )
    result = model(input_ids=batch(share), labels=batch(share), use_cache=False)
    result.loss.backward()
    found = {"loss": result.loss.detach(), "logits": result.logits.detach()}
    found |= {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    exact = unsharded(small_model("llama"), share)
    float8 = unsharded(in_float8(small_model("llama"), recipe), share)
    assert found.keys() == exact.keys() and len(exact) > 20
    own_error = {name: distance(float8[name], value) for name, value in exact.items()}
    assert 0.005 < max(own_error.values()) < 0.2
    for name, value in exact.items():
        if name == "loss":
            continue
        assert distance(found[name], value) <= 2 * own_error[name], (
            name,
            distance(found[name], value),
            own_error[name],
        )
        if recipe != "tensorwise":
            assert distance(found[name], float8[name]) <= 0.01 * max(own_error.values()), name
    assert abs(found["loss"] - exact["loss"]) <= 0.05 * exact["loss"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
def test_converted_first_it_trains_as_the_unsharded_model(recipe: str) -> None:
    on_ranks(4, train, recipe, {"sequence_parallel": True, "activation_checkpointing": {"mode": "full"}})


def test_without_sequence_parallelism() -> None:
    on_ranks(4, train, "rowwise", {})


def converted_afterwards(sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", prove=False)
    in_float8(model, "tensorwise")
    with pytest.raises(RuntimeError, match="q_proj was converted to float8 after apply_plan.*convert the model first"):
        model(input_ids=batch(0), use_cache=False)
    gathered = in_float8(small_model("llama"), "tensorwise", enable_fsdp_float8_all_gather=True)
    with pytest.raises(ValueError, match="enable_fsdp_float8_all_gather=False"):
        shardplan.apply_plan(gathered, mesh, "auto")


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_converted_afterwards_it_is_refused(sizes: tuple[int, int]) -> None:
    on_ranks(4, converted_afterwards, sizes)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_a_plan_is_validated_without_float8() -> None:
    """Of modules of one's own too, whose reduced model is a copy."""
    plan = {
        "version": "1",
        "tensor_parallel": {"*.up": "colwise", "*.down": "rowwise"},
    }

    def inputs(seed: int) -> dict[str, Tensor]:
        return {"input": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(seed))}

    model = in_float8(nn.Sequential(Block(), Block()), "tensorwise")
    assert tree_of(model) == tree_of(nn.Sequential(Block(), Block()))
    report = shardplan.validate(shardplan.Model(model, inputs=inputs), plan, {"tp": 2})
    assert report.ok, report
    assert type(model[0].up).__name__ == "Float8Linear"
