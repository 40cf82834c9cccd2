"""What the forms of torch's AdamW make while they update, in estimates and in `fit`."""

from __future__ import annotations

import pytest

import shardplan
from shardplan.core.fits import Choice
from shardplan.core.mesh import MeshSizes
from shardplan.cost.fit_screening import Bytes, _memory
from shardplan.cost.part_costs import PartCosts, Stored
from shardplan.cost.stage_costs import StageCosts
from tests.test_estimate import LLAMA

DEEP = LLAMA | {"num_hidden_layers": 24}


def estimated(optimizer, **options):
    return shardplan.estimate(
        shardplan.Model("llama", settings=DEEP),
        "auto",
        options.pop("mesh", {"dp_shard": 4, "tp": 2}),
        shardplan.TrainingStep(8, precision="fp32", optimizer=optimizer, micro_batches=options.pop("micro_batches", 1)),
        activation_checkpointing={"mode": "full"},
        **options,
    )


def test_adamw_makes_a_list_as_large_as_a_ranks_parameters():
    """The roots of the second moments, of all parameters at once: what AdamW does on a GPU. With few activations this is the peak."""
    listed, fused, loop = (estimated(name).memory for name in ("adamw", "adamw-fused", "adamw-for-loop"))
    held = 4 * estimated("none").held
    assert listed.phase == "optimizer step" and listed.peak["temporaries"] == listed.peak["gradients"] == held
    assert fused.phase == loop.phase == "backward" and fused.total == loop.total < listed.total
    assert listed.most["optimizer state"] == fused.most["optimizer state"] == loop.most["optimizer state"]


def test_parameters_on_the_host_are_updated_one_by_one():
    """torch's default there is the loop."""
    default, loop = (
        estimated(name, data_parallel={"cpu_offload": True}).memory for name in ("adamw", "adamw-for-loop")
    )
    assert default == loop


def test_a_stages_optimizer_makes_a_list_of_its_parameters():
    section = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}
    options = {"mesh": {"pp": 2, "dp_shard": 1, "tp": 2}, "micro_batches": 2, "pipeline_parallel": section}
    listed, fused = (estimated(name, **options, data_parallel=False) for name in ("adamw", "adamw-fused"))
    assert listed.memory.phase == "optimizer step"
    assert listed.memory.most["temporaries"] - fused.memory.most["temporaries"] >= 0.9 * 4 * listed.held


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_fit_counts_the_list_where_the_update_is_the_peak(schedule):
    """Of 1,000 elements on 4 ranks: stored, gradients, two states in float32, and a list more."""
    choice = Choice(MeshSizes(dp_shard=4, pp=2 if schedule else 1), 1, 2, "none", False, False, False, schedule, False)
    small, large = (
        [StageCosts(("one",), (PartCosts(kept={"activations": n}, stored=Stored(1000, 4000, 16000)),), 0, 0)]
        for n in (0, 10**6)
    )
    widths = Bytes(4, 0, 0, 8, 4), Bytes(4, 0, 0, 8)
    with_list, without = (_memory(choice, small, 0, width) for width in widths)
    assert without + 250 * 4 == with_list == 250 * (4 + 4 + 8 + 4)
    assert len({_memory(choice, large, 0, width) for width in widths}) == 1
