"""`estimate` of meshes with an axis pp."""

import pytest

import shardplan
from shardplan.core.schedules import SCHEDULES
from shardplan.cost.pipeline_estimate import Unschedulable

SEQ, HIDDEN = 32, 64
SETTINGS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "vocab_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 8,
    "max_position_embeddings": 64,
}
LAYERS = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}


def estimated(mesh, section=LAYERS, settings=SETTINGS, model="llama", **options):
    step = shardplan.TrainingStep(
        SEQ, micro_batches=options.pop("micro_batches", 8), schedule=options.pop("schedule", "1f1b")
    )
    options = {"data_parallel": False} | options
    return shardplan.estimate(
        shardplan.Model(model, settings=settings), "auto", mesh, step, pipeline_parallel=section, **options
    )


def test_the_parts_are_the_whole():
    """With one rank a stage and one micro-batch, what all stages do is what the whole model does."""
    whole = shardplan.estimate(
        shardplan.Model("llama", settings=SETTINGS),
        "auto",
        {"tp": 1},
        shardplan.TrainingStep(SEQ, micro_batches=8),
        data_parallel=False,
    )
    one = estimated({"pp": 2})
    assert one.parameters == whole.parameters and one.tokens == whole.tokens
    blocks = 8 * (2 * HIDDEN * 64 + 2 * HIDDEN * 32 + 3 * HIDDEN * 160 + 2 * HIDDEN)
    assert whole.held == blocks + 2 * 96 * HIDDEN + HIDDEN
    assert one.pipeline.sizes == (4, 4) and one.pipeline.fullest == 0
    assert one.memory.total == one.pipeline.peaks[0] > one.pipeline.peaks[1]
    assert one.held == blocks // 2 + 96 * HIDDEN
    head = 6 * SEQ * HIDDEN * 96 * 8
    assert one.pipeline.busiest == 1
    assert one.flops["bfloat16"] == (whole.flops["bfloat16"] - head) // 2 + head


def test_memory_grows_with_the_micro_batches_in_flight():
    for name, times in (("1f1b", 1), ("gpipe", 2)):
        few, many = (estimated({"pp": 4}, schedule=name, micro_batches=m).memory.peak for m in (8, 16))
        assert many["activations"] == times * few["activations"] and many.get("logits", 0) == times * few.get(
            "logits", 0
        )
        for category in ("parameters", "gradients", "optimizer state"):
            assert many.get(category) == few.get(category)
        assert ("gradients" in many) == (name == "1f1b")  # there are none yet where GPipe keeps the most


def test_what_is_handed_over():
    """The first block's result, forward and backward, in the layout that the plan has there."""
    one = estimated({"pp": 2})
    (sent,) = (t for t in one.traffic if t.axis == "pp")
    assert (sent.collective, sent.calls, sent.bytes) == ("send", 8, 8 * SEQ * HIDDEN * 2)
    split = estimated({"pp": 2, "tp": 2}, sequence_parallel=True)
    (half,) = (t for t in split.traffic if t.axis == "pp")
    assert half.bytes * 2 == sent.bytes
    middle = estimated({"pp": 4}, section=LAYERS | {"sizes": [1, 4, 2, 1]})
    assert middle.pipeline.busiest == 1
    (both,) = (t for t in middle.traffic if t.axis == "pp")
    assert both.bytes == 2 * sent.bytes


def test_data_parallel_ranks_add_gradients_up_before_they_reduce_them():
    one = estimated({"pp": 2, "dp_shard": 2}, data_parallel=None)
    alone = estimated({"pp": 2})
    assert one.memory.peak["parameters"] * 2 == pytest.approx(alone.memory.peak["parameters"], rel=0.01)
    assert one.memory.peak["gradients"] == pytest.approx(alone.memory.peak["gradients"], rel=0.01)
    gathers = {t.collective: t for t in one.traffic if t.axis == "dp_shard"}
    again = estimated({"pp": 2, "dp_shard": 2}, data_parallel=None, micro_batches=16)
    assert gathers == {t.collective: t for t in again.traffic if t.axis == "dp_shard"}  # once in a step


def test_a_tied_parameter_is_in_both_stages():
    settings = {k: v for k, v in SETTINGS.items() if k != "head_dim"} | {"tie_word_embeddings": True}
    apart = estimated({"pp": 2}, settings=settings, model="qwen2")
    assert apart.held == (apart.parameters - 96 * HIDDEN - HIDDEN) // 2 + 96 * HIDDEN


def test_the_step_is_the_slowest_rank_s_and_its_bubble():
    """Without a device, operations: those of 8 micro-batches on the last rank, and of one on the others."""
    one = estimated({"pp": 4})
    assert one.pipeline.busiest == 3 and one.pipeline.in_flight == {0: 4}
    blocks, head = 2, 6 * SEQ * HIDDEN * 96 / (one.flops["bfloat16"] / 8 - 6 * SEQ * HIDDEN * 96) * 2  # in blocks
    seconds = 8 * (blocks + head) + 3 * blocks
    assert one.pipeline.bubble == pytest.approx(1 - 8 * (4 * blocks + head) / (4 * seconds))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_an_estimate(name):
    one = estimated({"pp": 2}, schedule=name, device="h100")
    assert one.pipeline.schedule == name and 0 < one.pipeline.bubble < 0.5
    assert one.bound.terms["pipeline"] > one.bound.terms["compute"]
    assert len(one.pipeline.sizes) == 2 * SCHEDULES[name].stages_per_rank


def test_refused():
    with pytest.raises(Unschedulable, match="a micro-batch for each of its 4 stages, there are 2: see --micro-batches"):
        estimated({"pp": 4}, micro_batches=2)
    with pytest.raises(Unschedulable, match="the model has 8 blocks, too few for 16 stages"):
        estimated({"pp": 8}, schedule="interleaved")
    with pytest.raises(ValueError, match="did you mean gpipe"):
        estimated({"pp": 2}, schedule="gpip")


def test_accumulated_gradients():
    """Without stages, micro-batches are forwards and backwards on one rank: gradients of earlier ones stay."""

    def of(count, **mesh):
        return shardplan.estimate(
            shardplan.Model("llama", settings=SETTINGS),
            "auto",
            mesh,
            shardplan.TrainingStep(SEQ, micro_batches=count),
            sequence_parallel=True,
        )

    one, three = of(1, tp=2, dp_shard=2), of(3, tp=2, dp_shard=2)
    assert three.tokens == 3 * one.tokens and three.flops["bfloat16"] == 3 * one.flops["bfloat16"]
    assert {t.bytes / u.bytes for t, u in zip(three.traffic, one.traffic, strict=True)} == {3}
    assert three.memory.most == one.memory.most | {
        "gradients": three.memory.most["gradients"],
        "temporaries": three.memory.most["temporaries"],
    }
    assert three.memory.total > one.memory.total and of(8, tp=2, dp_shard=2).memory == three.memory
