"""Plans with experts that are distributed, on real ranks with FSDP2: loss, logits and every gradient of each data rank's batch, against
the unsharded model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from expert_runs import SETTINGS, Case, batch, build, equal_to_the_unsharded, of, planned
from processes import on_ranks
from small_models import whole
from torch._dynamo.utils import get_compilation_metrics

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error


@pytest.mark.proves("ep fsdp2", "tp ep fsdp2")
def test_two_ranks() -> None:
    on_ranks(2, equal_to_the_unsharded, [of("mixtral", dp_shard=2, ep=2), of("deepseek_v3", dp_shard=1, tp=2, ep=2)])


FOUR = [
    of("mixtral", dp_shard=4, ep=2),
    of("gpt_oss", dp_shard=4, ep=4, implementation="grouped_mm"),
    of("qwen3_moe", dp_shard=4, ep=4, exchange="pairs"),
    of("deepseek_v3", dp_shard=2, tp=2, ep=2, sequence_parallel=True),
    of("mixtral", dp_shard=2, tp=2, ep=4, implementation="batched_mm"),
    of("qwen3_moe", dp_shard=2, tp=2, ep=4, sequence_parallel=True),
    of("gpt_oss", dp_shard=2, tp=2, ep=4, sequence_parallel=True, exchange="pairs"),
    of("qwen3_moe", dp_shard=1, tp=4, ep=2, sequence_parallel=True),
    of("deepseek_v3", dp_replicate=2, dp_shard=1, tp=2, ep=2),
]


@pytest.mark.slow
@pytest.mark.proves("ep fsdp2", "tp sp ep fsdp2", "tp ep fsdp2", "tp ep hsdp")
def test_four_ranks() -> None:
    on_ranks(4, equal_to_the_unsharded, FOUR, seconds=300.0)


EXPERTS = "model.layers.*.mlp.experts"
OVER_TP = (
    (EXPERTS, "ep_experts"),
    (f"{EXPERTS}.gate_up_proj", "none"),
    (f"{EXPERTS}.down_proj", "none"),
)


@pytest.mark.slow
def test_whole_experts_over_tp_alone() -> None:
    """Each tp rank has some, without an axis ep; FSDP2 shards them as all parameters of the layer."""
    cases = [
        of("mixtral", dp_shard=2, tp=2),
        of("qwen3_moe", tp=4, sequence_parallel=True),
        of("deepseek_v3", dp_replicate=2, dp_shard=1, tp=2, sequence_parallel=True, implementation="grouped_mm"),
        of("deepseek_v3", dp_shard=2, tp=2, ep=4),  # the section distributes them over ep instead
    ]
    on_ranks(4, equal_to_the_unsharded, [replace(case, rules=OVER_TP) for case in cases])


EIGHT = [
    of("mixtral", dp_replicate=2, dp_shard=4, ep=2),
    of("gpt_oss", dp_replicate=2, dp_shard=2, tp=2, ep=4, implementation="grouped_mm"),
    of("deepseek_v3", dp_replicate=2, dp_shard=2, tp=2, ep=4, sequence_parallel=True),
    of("qwen3_moe", dp_shard=4, tp=2, ep=8),
    of("gpt_oss", dp_shard=4, tp=2, ep=8, sequence_parallel=True, implementation="batched_mm"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EIGHT, ids=lambda case: f"{case.model}-{dict(case.mesh)}")
@pytest.mark.proves("ep hsdp", "tp ep hsdp", "tp sp ep hsdp", "tp ep fsdp2", "tp sp ep fsdp2")
def test_eight_ranks(case: Case) -> None:
    """With HSDP, also where ep_shard is 1."""
    on_ranks(8, equal_to_the_unsharded, [case], seconds=400.0)


MANY = [
    of(model, implementation=implementation, sequence_parallel=sequence_parallel, **mesh)
    for model, implementation in product(SETTINGS, ("eager", "grouped_mm", "batched_mm"))
    for mesh, both in (
        ({"dp_shard": 4, "ep": 2}, False),
        ({"dp_shard": 4, "ep": 4}, False),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, True),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, True),
    )
    for sequence_parallel in ((False, True) if both else (False,))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", SETTINGS)
def test_four_ranks_with_every_implementation(model: str) -> None:
    on_ranks(4, equal_to_the_unsharded, [case for case in MANY if case.model == model], seconds=900.0)


COMPILE = ("compile", {"backend": "aot_eager", "fullgraph": False})  # the graph breaks at the experts
COMPILED = [
    replace(of("deepseek_v3", dp_shard=2, tp=2, ep=4, sequence_parallel=True), options=(COMPILE,)),
    replace(of("mixtral", dp_shard=2, tp=2, ep=2), options=(COMPILE, ("activation_checkpointing", {"mode": "full"}))),
]


@pytest.mark.exhaustive
@pytest.mark.proves("tp sp ep fsdp2 compile", "tp ep fsdp2 checkpointing compile")
def test_compiled_layers_with_the_experts_outside_of_their_graphs() -> None:
    on_ranks(4, equal_to_the_unsharded, COMPILED, seconds=600.0)


def compiled_frames(case: Case) -> Counter[tuple[str, int]]:
    """How often torch.compile compiled each function."""
    torch._dynamo.reset()
    before = len(get_compilation_metrics())
    equal_to_the_unsharded([case])
    made = get_compilation_metrics()[before:]
    return Counter((one.co_filename, one.co_firstlineno) for one in made if one.co_name is not None)


@pytest.mark.slow
def test_layers_share_what_is_compiled() -> None:
    """torch.compile gives a function up that it has compiled eight times (`recompile_limit`)."""
    layers = (("num_hidden_layers", 12),)
    case = replace(of("mixtral", dp_shard=1, tp=2, ep=2), settings=layers, options=(COMPILE,))
    (frames, _) = on_ranks(2, compiled_frames, case, seconds=300.0)
    assert frames and set(frames.values()) == {1}, frames


def sequences_over_cp() -> None:
    model, _ = planned(case := replace(of("mixtral", dp_shard=1, cp=2, tp=2, ep=4), attention="sdpa"))
    ids = batch(0, tokens=(2, 16))
    with shardplan.context_parallel(model, input_ids=ids, labels=ids, use_cache=False) as inputs:
        model(**inputs).loss.backward()
    reference = build(case)
    reference(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        assert relative_error(whole(parameter.grad), expected) <= TOLERANCE[torch.float32], name


@pytest.mark.exhaustive
@pytest.mark.proves("tp cp tokens ep fsdp2")
def test_ranks_of_context_parallelism_send_their_tokens() -> None:
    on_ranks(4, sequences_over_cp, seconds=300.0)
