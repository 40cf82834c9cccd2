"""Training in real processes: optimiser steps with clipping and gradient accumulation equal the unsharded model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from processes import on_ranks
from sampling import sampled
from small_models import small_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from training_runs import HYBRID, TWO_BY_TWO, Recipe, compare

import shardplan

ARCHITECTURES = [
    Recipe("qwen3", TWO_BY_TWO, tied=True),
    Recipe("phi3", TWO_BY_TWO),
    Recipe("qwen3_moe", TWO_BY_TWO, tied=True, mixture=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ARCHITECTURES, ids=lambda recipe: recipe.model)
@pytest.mark.proves("tp sp fsdp2")
def test_sequence_parallel_on_two_by_two(recipe):
    compare(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ARCHITECTURES, ids=lambda recipe: recipe.model)
@pytest.mark.proves("tp fsdp2")
def test_tensor_parallel_on_two_by_two(recipe):
    compare(replace(recipe, sequence_parallel=False))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sampled(ARCHITECTURES, 1), ids=lambda recipe: recipe.model)
@pytest.mark.proves("tp sp hsdp")
def test_hybrid_sharding_on_eight_ranks(recipe):
    compare(replace(recipe, sizes=HYBRID))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ARCHITECTURES, ids=lambda recipe: recipe.model)
@pytest.mark.proves("tp hsdp")
def test_hybrid_sharding_without_sequence_parallelism(recipe):
    compare(replace(recipe, sizes=HYBRID, sequence_parallel=False))


def freeze(model: nn.Module) -> None:
    """The tied embedding, a norm, a column-wise and a row-wise matrix, and a norm on heads."""
    layer = model.model.layers[0]
    for part in (model.model.embed_tokens, layer.input_layernorm, layer.mlp.up_proj, layer.self_attn.o_proj):
        part.requires_grad_(False)
    model.model.layers[1].self_attn.q_norm.requires_grad_(False)


MESHES = {
    "tp alone": {"tp": 4},
    "no tp": {"dp_shard": 4},
    "replicas, no tp": {"dp_replicate": 2, "dp_shard": 2},
    "other spellings": {"data_parallel": 2, "tensor_parallel": 2},
    "of size one": {"dp_replicate": 1, "dp_shard": 4, "tp": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.proves("tp sp", "fsdp2", "hsdp")
def test_meshes(mesh):
    compare(Recipe("qwen3", MESHES[mesh], tied=True))


@pytest.mark.slow
def test_an_axis_of_any_name():
    compare(Recipe("phi3", {"dp": 2, "rows": 2}, options={"axes": {"tp": "rows"}}))


VARIANTS = {
    "frozen parameters": Recipe("qwen3", TWO_BY_TWO, tied=True, change=freeze),
    "gradients reduced at the last micro-batch": Recipe("qwen3", TWO_BY_TWO, defer=True),
    "split logits": Recipe("qwen3", TWO_BY_TWO, tied=True, options={"logits": "sharded"}),
    "all layers kept gathered": Recipe("phi3", TWO_BY_TWO, options={"data_parallel": {"reshard_after_forward": False}}),
    "prefetch": Recipe("phi3", TWO_BY_TWO, options={"data_parallel": {"prefetch": {"forward": 1, "backward": 1}}}),
    "offload": Recipe("phi3", TWO_BY_TWO, options={"data_parallel": {"cpu_offload": True}}),
    "ddp": Recipe("qwen3", {"dp_replicate": 4}, tied=True, options={"data_parallel": {"backend": "ddp"}}),
    "activation checkpointing": Recipe(
        "qwen3_moe", TWO_BY_TWO, tied=True, mixture=True, options={"activation_checkpointing": {"mode": "full"}}
    ),
    "a frozen model split by tp alone": Recipe("qwen3", {"tp": 4}, change=freeze, sequence_parallel=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.proves("ddp", "tp sp fsdp2 checkpointing", "tp")
def test_variants(variant):
    compare(VARIANTS[variant])


def refused(sizes: dict[str, int], options: dict[str, object]) -> str:
    """What apply_plan raises for a mesh, leaving the model as it was."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = small_model("llama")
    with pytest.raises((ValueError, shardplan.PlanError)) as caught:
        shardplan.apply_plan(model, mesh, "auto", **options, prove=False)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    shardplan.apply_plan(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), "auto", prove=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({"tp": 2, "dp_shard": 2}, {}, ["must be in the order ('dp_shard', 'tp')"]),
        ({"rows": 2, "tp": 2}, {}, ["'rows'", "axes="]),
        ({"dp": 2, "fsdp": 2}, {}, ["dp_shard"]),
        ({"dp_replicate": 2, "tp": 2}, {}, ["dp_shard"]),
        ({"dp_shard": 2, "tp": 2}, {"data_parallel": False}, ["SP553", "dp_shard=2", "no data_parallel section"]),
        ({"dp_shard": 2, "tp": 2}, {"data_parallel": {"backend": "ddp"}}, ["ddp", "dp_shard"]),
        ({"dp_replicate": 2, "tp": 2}, {"data_parallel": {"backend": "ddp"}}, ["ddp", "tp=2"]),
    ],
    ids=[
        "order",
        "unknown axis",
        "two of one meaning",
        "no shard axis",
        "no section",
        "ddp cannot shard",
        "ddp with tp",
    ],
)
@pytest.mark.refuses("tp ddp", "fsdp2 ddp")
def test_meshes_that_are_refused(sizes, options, words):
    for text in on_ranks(4, refused, sizes, options):
        assert all(word in text for word in words), text
