"""Activation checkpointing and per-layer torch.compile together with FSDP2, in real processes."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import pytest
from processes import on_ranks
from small_models import batch, small_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import TWO_BY_TWO, Recipe, compare

import shardplan

GRAPHS = {"activation_checkpointing": True, "compile": {"modules": ["model.layers.*"], "backend": "aot_eager"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("qwen3", TWO_BY_TWO, tied=True, options=GRAPHS),
        Recipe("qwen3", TWO_BY_TWO, sequence_parallel=False, options=GRAPHS),
        Recipe("phi3", TWO_BY_TWO, options={"compile": GRAPHS["compile"]}),
    ],
    ids=["sequence", "tensor", "packed, without checkpointing"],
)
def test_compiled_layers_train_alike(recipe):
    compare(recipe, seconds=300)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_trains_alike():
    options = {"activation_checkpointing": True, "compile": {"modules": ["model.layers.*"]}}
    compare(Recipe("qwen3", TWO_BY_TWO, tied=True, options=options), seconds=500)


NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


class Collectives(TorchDispatchMode):
    """Counts the functional collectives: those of the tp axis. FSDP2's have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name in NAMES:
            self.counts[NAMES[name]] += 1
        return func(*args, **(kwargs or {}))


def counted(checkpointing: bool) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """What ran in one step, and what `applied` says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = small_model("qwen3", tied=True)
    shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, activation_checkpointing=checkpointing)
    ids = batch(mesh.get_local_rank("dp_shard"))
    with Collectives() as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Collectives() as backward:
        loss.backward()
    return {"forward": forward.counts, "backward": backward.counts}, dict(shardplan.applied(model).collectives)


def test_a_blocks_own_door_is_not_run_again_by_activation_checkpointing():
    plain, expected = on_ranks(4, counted, False)[0]
    assert plain == expected
    again, said = on_ranks(4, counted, True)[3]
    assert said == expected and again["forward"] == expected["forward"]
    # Inside each of the two layers, the doors of attention and MLP gather, and their outputs are reduced; the
    # recomputation stops at the last value that backward needs, which is before the MLP's reduction. The first
    # layer's own door, a reduction of the embedding, is outside the checkpoint.
    extra = again["backward"] - expected["backward"]
    assert extra == Counter({"all_gather": 4, "reduce_scatter": 2})
