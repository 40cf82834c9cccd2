"""The estimated peak against the allocator's own account of a real run."""

import pytest
from processes import on_ranks

from benchmarks.memory import LLAMA, Case, estimated_peak, measured_peak

SMALL = LLAMA | {"num_hidden_layers": 4}
MESH = {"dp_shard": 2, "tp": 2}
CASES = {
    "sequence parallel": Case("llama", MESH, SMALL, {"sequence_parallel": True}),
    "recomputed": Case("llama", MESH, SMALL, {"sequence_parallel": True, "activation_checkpointing": True}),
    "tensor parallel, split logits": Case("llama", MESH, SMALL, {"logits": "sharded"}),
}


def peaks():
    return {name: measured_peak(case) for name, case in CASES.items()}


@pytest.mark.slow
def test_the_estimate_is_within_one_percent_of_a_real_run():
    ranks = on_ranks(4, peaks, seconds=300)  # with equal shards: what a rank has more than another is gloo's
    real = {name: min(one[name] for one in ranks) for name in CASES}
    ratios = {name: estimated_peak(case) / real[name] for name, case in CASES.items()}
    assert {name: ratio for name, ratio in ratios.items() if not 0.99 <= ratio <= 1.01} == {}, ratios
