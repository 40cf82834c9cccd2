"""timm's ViT and Swin, unmodified: `init` splits their heads, and what it finds is proven."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import timm_models as timm

import shardplan

pytestmark = pytest.mark.slow
MLP = {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
QKV = {"style": "packed_colwise", "packed": 3}


def on_processes(name: str, document: Any, *, sequence_parallel: bool = False) -> bool:
    """Whether a plan is proven on two processes; they build the model themselves, as its package lies outside of the environment."""
    inputs = f"tests.timm_models:{name.rpartition('_')[2]}_pictures"
    model = f"tests.timm_models:{name}"
    return shardplan.verify(
        shardplan.Model(model, inputs=inputs), document, {"tp": 2}, sequence_parallel=sequence_parallel, processes=True
    ).ok


def rules(document: Any, blocks: str, section: str = "tensor_parallel") -> dict[str, Any]:
    return {name.removeprefix(f"{blocks}."): rule for name, rule in document[section].items()}


@pytest.mark.exhaustive
def test_vit_is_split_by_heads() -> None:
    document = shardplan.init_plan(shardplan.Model(timm.vit(), inputs=timm.vit_pictures)).document
    found = rules(document, "blocks.*")
    assert found == {
        "attn": {"style": "input_with_grad_allreduce", "shares": ["num_heads", "attn_dim"]},
        "attn.qkv": QKV,
        "attn.proj": "rowwise",
        "mlp": "input_with_grad_allreduce",
        **MLP,
    }
    for tp in (2, 4):
        assert shardplan.verify(shardplan.Model(timm.vit(), inputs=timm.vit_pictures), document, {"tp": tp}).ok


def test_vit_without_a_class_token_is_split_by_tokens_too() -> None:
    document = shardplan.init_plan(
        shardplan.Model(timm.pooled_vit(), inputs=timm.vit_pictures), sequence_parallel=True
    ).document
    found = rules(document, "blocks.*", "sequence_parallel")
    assert found["attn.proj"] == found["mlp.fc2"] == "rowwise_seq"
    for sequence_parallel in (False, True):
        assert on_processes("pooled_vit", document, sequence_parallel=sequence_parallel)


def test_swin_is_split_by_heads_in_every_stage() -> None:
    document = shardplan.init_plan(shardplan.Model(timm.swin(), inputs=timm.swin_pictures)).document
    assert rules(document, "layers.*.blocks.*") == {
        "attn": {"style": "local_params", "shares": ["num_heads"]},
        "attn.relative_position_bias_table": "rowwise",
        "attn.qkv": QKV,
        "attn.proj": "rowwise",
        **MLP,
    }
    assert on_processes("swin", document)


def test_heads_that_tp_does_not_divide_are_named() -> None:
    """The published Swin begins with three."""
    model = timm.swin(embed_dim=48, num_heads=(3, 6, 12))
    whole, said = shardplan.init_plan(shardplan.Model(model, inputs=timm.swin_pictures)).diagnostics
    assert whole.code == "SP532" and whole.message.startswith("layers.*.downsample.reduction stay whole")
    assert said.code == "SP534"
    assert said.help == (
        "choose a tp that divides num_heads, which is 3 in layers.0.blocks.0.attn: a rank computes with whole heads"
    )


def test_the_folder_of_timm_is_no_path_of_processes_that_are_spawned() -> None:
    """They would find torchvision there, which needs operators that the parent alone has."""
    timm.timm()
    assert str(timm.FOLDER) not in sys.path
