"""How many blocks a stage has: what a block costs is counted in a run without memory."""

from dataclasses import replace

import pytest

import shardplan
from shardplan.core.schedules import SCHEDULES
from shardplan.core.sections import PipelineParallel
from shardplan.cost.stage_sizes import block_costs, stage_sizes
from shardplan.model import find_any

HIDDEN, INNER, ROWS, SEQ = 64, 160, 960, 32
SETTINGS = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": ROWS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 11,
    "max_position_embeddings": 64,
}

EXPERTS = {name: value for name, value in SETTINGS.items() if name != "head_dim"}


def cut(model="llama", settings=SETTINGS, section=None, **options):
    """A model and its plan, bound, with the parts of stages as a compiled plan on a mesh with pp has them."""
    found = find_any(model, settings=settings)
    resolved = shardplan.compile_plan(model, {"tp": 2}, "auto", settings=settings, **options).resolved
    names = [n for n in found.tree.modules if n.startswith("model.layers.") and n.count(".") == 2]
    return found, replace(
        resolved,
        pipeline_parallel=section or PipelineParallel(layers="model.layers.*"),
        pp_blocks=tuple(names),
        pp_first=("model.embed_tokens",),
        pp_last=("model.norm", "lm_head"),
    )


def test_costs_are_those_of_the_shapes():
    """Forward once, backward twice; attention two products forward and five backward, causal."""
    found, resolved = cut()
    heads, kv = 64, 32
    linear = 6 * SEQ * (2 * HIDDEN * heads + 2 * HIDDEN * kv + 3 * HIDDEN * INNER)
    attention = (2 + 5) * (8 * SEQ * SEQ * 8 * 2) // 2
    costs = block_costs(found, resolved, SEQ)
    assert costs.blocks == (linear + attention,) * 11
    assert (costs.first, costs.last) == (0, 6 * SEQ * HIDDEN * ROWS)


def test_what_checkpointing_computes_again_counts():
    found, resolved = cut(activation_checkpointing={"mode": "full"})
    plain, again = (
        block_costs(found, one, SEQ) for one in (replace(resolved, activation_checkpointing=None), resolved)
    )
    linear = 2 * SEQ * (2 * HIDDEN * 64 + 2 * HIDDEN * 32 + 3 * HIDDEN * INNER)
    attention = 2 * (8 * SEQ * SEQ * 8 * 2) // 2
    assert [b - a for a, b in zip(plain.blocks, again.blocks, strict=True)] == [linear + attention] * 11
    assert again.last == plain.last


def test_experts_cost_what_a_token_reaches():
    settings = EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sparse, _ = (block_costs(*cut("qwen3_moe", settings | {"decoder_sparse_step": step}), SEQ) for step in (1, 2))
    assert len(set(sparse.blocks)) == 1
    more = block_costs(*cut("qwen3_moe", settings | {"num_experts_per_tok": 4}), SEQ)
    assert more.blocks[0] - sparse.blocks[0] == 6 * SEQ * 2 * 3 * HIDDEN * 32


def test_layers_of_several_kinds():
    settings = EXPERTS | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    }
    found, resolved = cut("qwen3_moe", settings)
    costs = block_costs(found, resolved, SEQ)
    assert len(set(costs.blocks[0::2])) == len(set(costs.blocks[1::2])) == 1 and costs.blocks[0] != costs.blocks[1]


def test_sizes_by_the_section():
    found, resolved = cut()
    one, two = SCHEDULES["1f1b"], SCHEDULES["interleaved"]
    assert stage_sizes(found, resolved, 4, one, seq_len=SEQ) == (3, 3, 3, 2)  # the head is 1.35 blocks
    assert stage_sizes(*cut(settings=SETTINGS | {"vocab_size": 3 * ROWS}), 4, one, seq_len=SEQ) == (3, 3, 4, 1)
    assert len(stage_sizes(found, resolved, 2, two)) == 4 and len(stage_sizes(found, resolved, 2, two, 3)) == 6
    even = replace(resolved, pipeline_parallel=PipelineParallel(layers="model.layers.*", balance="layers"))
    assert stage_sizes(found, even, 4, one) == (3, 3, 3, 2)
    own = replace(resolved, pipeline_parallel=PipelineParallel(layers="model.layers.*", sizes=(4, 4, 3)))
    assert stage_sizes(found, own, 3, one) == (4, 4, 3)
    with pytest.raises(ValueError, match="3 numbers with the sum 11, but 2 stages"):
        stage_sizes(found, own, 2, one)
    with pytest.raises(ValueError, match="11 blocks cannot be cut into 12 stages"):
        stage_sizes(found, resolved, 12, one)


def test_a_process_group_may_exist(tmp_path):
    """`apply_pipeline` asks on a mesh of processes."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert stage_sizes(*cut(), 2, SCHEDULES["1f1b"], seq_len=SEQ) == stage_sizes(
            *cut(), 2, SCHEDULES["gpipe"], seq_len=SEQ
        )
    finally:
        dist.destroy_process_group()
