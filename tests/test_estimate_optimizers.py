"""What the forms of torch's AdamW make while they update, in estimates and in `fit`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardplan
from shardplan.core.fits import Choice
from shardplan.core.mesh import MeshSizes
from shardplan.cost import fit_screening
from shardplan.cost.devices import read_device
from shardplan.cost.fit_screening import Bytes, Table, _memory, screen
from shardplan.cost.muon_step import owners_work
from shardplan.cost.part_costs import PartCosts, Stored
from shardplan.cost.stage_costs import StageCosts
from shardplan.optimizers import Muon
from tests.collective_counter import CollectiveCounter
from tests.proofs import fake_mesh
from tests.test_estimate import LLAMA

SOURCE = shardplan.Model("llama", settings=LLAMA | {"num_hidden_layers": 6})
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


def step_of(optimizer, model):
    """What a step sends, and the bytes of the states that this rank keeps after it."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with CollectiveCounter() as counter:
        optimizer.step()
    states = (x for state in optimizer.state.values() for x in state.values())
    return counter, sum(x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in states)


@pytest.mark.parametrize("mesh", [{"dp_shard": 4, "tp": 1}, {"dp_shard": 2, "tp": 2}], ids=["dp 4", "dp 2 x tp 2"])
def test_muons_step_is_counted_as_it_runs(mesh):
    """Collectives, their bytes and the states of a rank, of the whole depth: which of the matrices a rank owns no shorter model tells."""
    with fake_mesh(*mesh.values(), names=tuple(mesh)) as real:
        model = shardplan.apply_plan(SOURCE.find().build("meta"), real, "auto", src_data_rank=None, prove=False)
        model.to_empty(device="cpu")
        optimizer = Muon(model)
        counter, kept = step_of(optimizer, model)
    plain, muon = (
        shardplan.estimate(SOURCE, "auto", mesh, shardplan.TrainingStep(8, precision="fp32", optimizer=name))
        for name in ("none", "muon")
    )
    before = Counter({(one.axis, one.collective): one for one in plain.traffic})
    added = [one for one in muon.traffic if (one.axis, one.collective) not in before]
    sent = Counter()
    for call in counter.calls:
        bytes = call.elements * (4 if call.name == "all_reduce" else 2)  # int32, and what Newton-Schulz reads, bfloat16
        sent[call.name] += (2 if call.name == "all_reduce" else 1) * 3 * bytes // 4
    assert {one.collective: one.bytes for one in added} == sent and sum(one.calls for one in added) == len(
        counter.calls
    )
    own = shardplan.estimate(
        SOURCE, "auto", mesh, shardplan.TrainingStep(8, precision="fp32", optimizer="whole-matrix")
    )
    exchanged = {one.bytes for one in own.traffic if one.collective == "all_to_all" and one not in plain.traffic}
    assert exchanged == {2 * sent["all_to_all"]}, "in float32, the dtype of the gradients"
    assert muon.memory.most["optimizer state"] == own.memory.most["optimizer state"] == kept
    assert muon.flops["bfloat16"] > 0 == plain.flops.get("bfloat16", 0)


SECTION = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}


def test_muons_step_of_a_stage_is_counted_as_it_runs():
    """Of the first pp rank: its own matrices, their collectives and states. The busiest rank's work and bytes are in the estimate."""
    sizes = {"pp": 2, "dp_shard": 2, "tp": 2}
    stages = shardplan.PipelineOptions("1f1b", 2)
    options = {"pipeline_parallel": SECTION, "pipeline": stages, "src_data_rank": None, "prove": False}
    with fake_mesh(*sizes.values(), names=tuple(sizes)) as real:
        pipeline = shardplan.apply_plan(SOURCE.find().build("meta"), real, "auto", **options)
        [stage] = pipeline.parts
        stage.to_empty(device="cpu")
        optimizer = Muon(pipeline)
        assert 0 < len(optimizer.stacks) < len(Muon(SOURCE.find().build("meta")).stacks)
        counter, kept = step_of(optimizer, stage)
    plain, muon = (
        shardplan.estimate(
            SOURCE,
            "auto",
            sizes,
            shardplan.TrainingStep(8, precision="fp32", optimizer=name, micro_batches=2),
            pipeline_parallel=SECTION,
        )
        for name in ("none", "muon")
    )
    assert muon.pipeline.fullest == 1  # it has the last norm too, whose two moments AdamW keeps, and a number of steps
    assert muon.memory.most["optimizer state"] == kept + 2 * 4 * LLAMA["hidden_size"] // 2 + 4
    before = Counter({(one.axis, one.collective): (one.calls, one.bytes) for one in plain.traffic})
    added = [one for one in muon.traffic if before[one.axis, one.collective] != (one.calls, one.bytes)]
    assert sorted(one.collective for one in added) == ["all_reduce", "all_to_all"]
    counted = sum(one.calls - (before[one.axis, one.collective] or (0, 0))[0] for one in added)
    assert counted == len(counter.calls) == 3, "both stages have as many blocks"
    sent = 2 * sum(call.elements for call in counter.calls if call.name == "all_to_all") * 3 // 4
    assert [one.bytes for one in added if one.collective == "all_to_all"] == [sent]
    whole = shardplan.estimate(
        SOURCE, "auto", {"dp_shard": 2, "tp": 2}, shardplan.TrainingStep(8, precision="fp32", optimizer="muon")
    )
    assert muon.flops["bfloat16"] == pytest.approx(whole.flops["bfloat16"] / 2, rel=0.1)


def test_the_owners_work_that_fit_compares_is_that_of_the_estimate(monkeypatch):
    """Copies of a matrix are stepped by all ranks that have them: other meshes are the best than with AdamW."""
    found = SOURCE.find()
    alone = shardplan.estimate(
        SOURCE, "auto", {"dp_shard": 1, "tp": 1}, shardplan.TrainingStep(8, precision="fp32", optimizer="muon")
    )
    assert owners_work(found, {}) == pytest.approx(alone.flops["bfloat16"], rel=0.01)
    heads = {"separate_matrices": {"heads": ["model.layers.*.self_attn.{q,k,v}_proj"]}}
    apart = shardplan.compile_plan(SOURCE, {"tp": 1}, "auto", **heads).resolved.matrices
    step = shardplan.TrainingStep(8, precision="fp32", optimizer="muon")
    smaller = shardplan.estimate(SOURCE, "auto", {"dp_shard": 1, "tp": 1}, step, **heads)
    assert len(apart) == 18 and owners_work(found, apart) < 0.95 * owners_work(found, {})
    assert owners_work(found, apart) == pytest.approx(smaller.flops["bfloat16"], rel=0.01)
    monkeypatch.setattr(fit_screening, "_stages", lambda *_: (StageCosts(("one",), (PartCosts(),), 0, 0),))
    table, device = Table(("one",), None, {}), read_device("h100")
    shards, copies = (
        screen(Choice(sizes, 1, 1, "none", False, False, False, None, False), table, Bytes(4, 2, 4, 4), device, 10**15)
        for sizes in (MeshSizes(dp_shard=4), MeshSizes(dp_replicate=2, dp_shard=2))
    )
    assert shards.bound.terms["compute"] == 10**15 / 4 / device.flops["bfloat16"] == copies.bound.terms["compute"] / 2
    options = {"gpus": 4, "device": "h100", "global_batch": 8, "seq_len": 64, "best": 1}
    [row] = shardplan.fit(SOURCE, "auto", {"tp": 2, "pp": 1}, optimizer="muon", **options).rows
    assert row.estimate.flops["bfloat16"] > owners_work(found, {}) / 4 and row.estimate.asked.step.optimizer == "muon"
