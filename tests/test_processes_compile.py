"""Activation checkpointing and per-layer torch.compile together with FSDP2, in real processes."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import TWO_BY_TWO, Recipe, compare

import shardplan

GRAPHS = {
    "activation_checkpointing": {"mode": "full"},
    "compile": {"modules": ["model.layers.*"], "backend": "aot_eager"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("qwen3", TWO_BY_TWO, tied=True, options=GRAPHS),
        pytest.param(
            Recipe("qwen3", TWO_BY_TWO, sequence_parallel=False, options=GRAPHS), marks=pytest.mark.exhaustive
        ),
        Recipe("phi3", TWO_BY_TWO, options={"compile": GRAPHS["compile"]}),
    ],
    ids=["sequence", "tensor", "packed, without checkpointing"],
)
@pytest.mark.proves("tp sp fsdp2 checkpointing compile", "tp fsdp2 checkpointing compile", "tp sp fsdp2 compile")
def test_compiled_layers_train_alike(recipe):
    compare(recipe, seconds=300)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="inductor of torch 2.11 cannot train attention in float64, unsharded neither"
)
@pytest.mark.proves("tp sp fsdp2 checkpointing compile")
def test_inductor_trains_alike():
    options = {"activation_checkpointing": {"mode": "full"}, "compile": {"modules": ["model.layers.*"]}}
    compare(Recipe("qwen3", TWO_BY_TWO, tied=True, options=options), seconds=500)


SELECTIVE = {"mode": "selective"}
ATTENTION = {"mode": "selective", "modules": ["model.layers.*.self_attn"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            Recipe("qwen3_moe", TWO_BY_TWO, tied=True, mixture=True, options={"activation_checkpointing": SELECTIVE}),
            marks=pytest.mark.exhaustive,
        ),
        Recipe("phi3", TWO_BY_TWO, sequence_parallel=False, options={"activation_checkpointing": ATTENTION}),
        Recipe("qwen3", TWO_BY_TWO, tied=True, options={**GRAPHS, "activation_checkpointing": SELECTIVE}),
        Recipe("gpt2", TWO_BY_TWO, options={"activation_checkpointing": {"mode": "selective", "every": 2}}),
    ],
    ids=["experts", "attention alone", "compiled", "every second layer"],
)
@pytest.mark.proves("tp fsdp2 checkpointing", "tp sp fsdp2 checkpointing compile", "tp sp fsdp2 checkpointing")
def test_selective_checkpointing_trains_alike(recipe):
    compare(recipe, seconds=300)


NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}


class Collectives(TorchDispatchMode):
    """Counts the functional collectives: those of the tp axis. FSDP2's have other names. Operators of the names in `also` too."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code is compiled under this mode, not skipped

    def __init__(self, *also: str) -> None:
        super().__init__()
        self.also = also
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name in NAMES:
            self.counts[NAMES[name]] += 1
        if name in self.also:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counted(checkpointing: bool) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """What ran in one step, and what `applied` says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = small_model("qwen3", tied=True)
    shardplan.apply_plan(
        model,
        mesh,
        "auto",
        sequence_parallel=True,
        activation_checkpointing={"mode": "full"} if checkpointing else False,
        prove=False,
    )
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
    # Inside each of the two layers, the block inputs of attention and MLP gather, and their outputs are reduced; the
    # recomputation stops at the last value that backward needs, which is before the MLP's reduction. The first
    # layer's own block input, a reduction of the embedding, is outside the checkpoint.
    extra = again["backward"] - expected["backward"]
    assert extra == Counter({"all_gather": 4, "reduce_scatter": 2})


def selectively(*cases: tuple[Any, Any]) -> list[tuple[float, Counter[str]]]:
    """The loss, and what backward runs, for each pair of checkpointing and compile sections."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    ids, results = batch(mesh.get_local_rank("dp_shard")), []
    for checkpointing, compiled in cases:
        model = small_model("qwen3", tied=True)
        shardplan.apply_plan(
            model,
            mesh,
            "auto",
            sequence_parallel=True,
            activation_checkpointing=checkpointing,
            compile=compiled,
            prove=False,
        )
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with Collectives("mm", "silu", "_scaled_dot_product_flash_attention_for_cpu") as backward:
            loss.backward()
        results.append((loss.item(), backward.counts))
    return results


@pytest.mark.slow
def test_selective_checkpointing_keeps_products_and_collectives():
    cases = [
        (False, None),
        (SELECTIVE, None),
        ({"mode": "selective", "every": 2}, None),
        (SELECTIVE, {"backend": "aot_eager"}),
        ({"modules": ["model.layers.*.mlp"]}, None),
    ]
    plain, selective, second, compiled, mlp = on_ranks(4, selectively, *cases)[0]
    again = Counter(silu=2)
    assert plain[1]["silu"] == 0 and plain[1]["all_gather"] and plain[1]["mm"]
    for loss, _ in (selective, second, compiled, mlp):
        assert loss == pytest.approx(plain[0], rel=1e-6)
    assert selective[1] - plain[1] == again, (
        "the activation function is computed again, products and collectives are not"
    )
    assert compiled[1] - plain[1] == again
    assert second[1] - plain[1] == Counter(silu=1), "one of two layers"
    assert mlp[1] - plain[1] == Counter(silu=2, mm=4), "gate and up of two layers; the last product is not needed"
