"""`init` finds what models need in which more than one value runs along the blocks; each plan is proven on slices and on processes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from torch import nn

import shardplan
from tests import own_streams as own
from tests.derived_plans import meets
from tests.own_structures import Tokens, ids

Rules = Mapping[str, Any]
SPLIT = "split_seq_input"
PARTIAL = "replicated_with_grad_allreduce"
GATHERED = {"style": "sequence_parallel", "output": "gather"}

# A model -> what is asked of its rules without sequence parallelism, and with it; `blocks.*.` stands in front where no other name does.
MODELS: dict[str, tuple[Callable[[], nn.Module], Rules, Rules]] = {
    "biases of all heads": (
        partial(own.Slopes, False),
        {"attn": {"shares": ["num_heads", {"bias": {"dim": 0}}]}},
        {"attn": "gather_seq_input", "^embed_norm": SPLIT, "^embed_norm.weight": PARTIAL},
    ),
    "biases of the heads of a batch": (
        partial(own.Slopes, True),
        {"attn": {"shares": ["num_heads", {"bias": {"dim": 0, "heads": str(own.HEADS)}}]}},
        {"^embed": "embedding_rowwise_seq"},
    ),
    "decays in buffers": (
        own.Hybrid,
        {"{attn}": {"shares": ["num_heads", {"decay": {"dim": 0}}], "having": "gate"}, "attn.gate": "colwise"},
        {"{attn}": {"style": "gather_seq_input", "having": "gate"}, "attn.o": "rowwise_seq"},
    ),
    "logits of routers": (
        own.Balanced,
        {
            "mlp": {"output": "all_reduce"},
            "mlp.experts.up.weight": "packed_colwise",
            "mlp.experts.router": {"read_outside": [2]},
        },
        {"mlp": {"output": "reduce_scatter"}},
    ),
    "a norm after the sum of experts": (
        partial(Tokens, partial(own.Mixed, own.Softmax, own.Closing)),
        {"^blocks.*": {"sum_outputs": ["mlp.experts", "mlp.shared.down"]}},
        {"mlp.experts": {"output": "reduce_scatter"}, "mlp.norm": "sequence_parallel"},
    ),
    "an adapter after a split value": (
        partial(Tokens, own.AdaptedBlock),
        {"intermediate": "colwise", "output.dense": "rowwise", "output.down": "colwise"},
        {"output.down": "colwise_seq", "output.norm": "sequence_parallel"},
    ),
    "parts in lists": (
        partial(Tokens, own.Twice),
        {"attns.*": {"shares": ["num_heads"]}, "mlps.*.up": "colwise"},
        {"mlps.*": {"style": "gather_seq_input"}, "norms.*": "sequence_parallel"},
    ),
    "vectors for each token": (
        own.Sides,
        {"mlp.up": "colwise"},
        {"^embed": "embedding_rowwise_seq", "^vectors": None, "gate": GATHERED, "back": SPLIT, "back.weight": PARTIAL},
    ),
    "small matrices between": (
        own.Connecting,
        {"connection.down": None, "mlp.up": "colwise"},
        {"connection.down": "sequence_parallel", "^mixer": GATHERED},
    ),
}
SAMPLE = ("biases of all heads", "parts in lists")  # what `make test` runs


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_it_is_found(name: str) -> None:
    build, split, sliced = MODELS[name]
    document = shardplan.init_plan(shardplan.Model(build(), inputs=ids), sequence_parallel=True).document
    for section, wanted in (("tensor_parallel", split), ("sequence_parallel", sliced)):
        found = {pattern: document[section].get(_address(pattern)) for pattern in wanted}
        assert all(meets(found[pattern], rule) for pattern, rule in wanted.items()), (section, found)
    for sequence_parallel in (False, True):
        assert shardplan.verify(
            shardplan.Model(build(), inputs=ids), document, {"tp": 2}, sequence_parallel=sequence_parallel
        ).ok


def _address(pattern: str) -> str:
    return pattern.removeprefix("^") if pattern.startswith("^") else f"blocks.*.{pattern}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_on_processes(name: str) -> None:
    build, _, _ = MODELS[name]
    document = shardplan.init_plan(shardplan.Model(build(), inputs=ids), sequence_parallel=True).document
    report = shardplan.verify(shardplan.Model(build(), inputs=ids), document, {"tp": 4}, processes=True)
    assert report.ok and len(report.variants) == 2
