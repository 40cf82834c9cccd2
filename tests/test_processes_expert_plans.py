"""Plans with experts that are distributed, on real ranks with FSDP2: loss, logits and every gradient of each data rank's batch, against
the unsharded model."""

from __future__ import annotations

from itertools import product

import pytest
from expert_runs import SETTINGS, Case, equal_to_the_unsharded, of
from processes import on_ranks


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
def test_four_ranks() -> None:
    on_ranks(4, equal_to_the_unsharded, FOUR, seconds=300.0)


EIGHT = [
    of("mixtral", dp_replicate=2, dp_shard=4, ep=2),
    of("gpt_oss", dp_replicate=2, dp_shard=2, tp=2, ep=4, implementation="grouped_mm"),
    of("deepseek_v3", dp_replicate=2, dp_shard=2, tp=2, ep=4, sequence_parallel=True),
    of("qwen3_moe", dp_shard=4, tp=2, ep=8),
    of("gpt_oss", dp_shard=4, tp=2, ep=8, sequence_parallel=True, implementation="batched_mm"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EIGHT, ids=lambda case: f"{case.model}-{dict(case.mesh)}")
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
