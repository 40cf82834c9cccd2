"""Per-layer torch.compile: no graph break, and one graph for all layers of a kind."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.proofs import fake_mesh, optimised, planned, reduced_model


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with fake_mesh(2) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# One plan on every change; the others are slow ones.
PLANS = [
    "llama",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "phi3", "cohere", "olmo2", "gpt2")),
]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("plan", PLANS)
def test_layers_compile_whole_and_to_one_graph(plan, sp, checkpointing, mesh):
    small = reduced_model(plan, 2)
    model = (optimised if plan == "cohere" else planned)(  # cohere: partial sums wait for others
        small.build(),
        mesh,
        plan,
        sequence_parallel=sp,
        activation_checkpointing=checkpointing,
        compile={"modules": [LAYERS.get(plan, "model.layers.*")], "fullgraph": True, "backend": "aot_eager"},
    )
    for _ in range(2):
        model(**small.inputs(), use_cache=False).loss.backward()
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


LAYERS = {"gpt2": "transformer.h.*"}


@pytest.mark.slow
def test_a_graph_break_would_be_seen(mesh):
    """The test above can fail: a layer that looks at a value has a break."""
    small = reduced_model("llama", 2)
    model = planned(
        small.build(),
        mesh,
        "llama",
        compile={"modules": ["model.layers.*"], "fullgraph": False, "backend": "aot_eager"},
    )
    model.model.layers[0].mlp.act_fn.register_forward_hook(
        lambda module, args, out: print(end="") if out.sum() > 0 else None
    )
    model(**small.inputs(), use_cache=False)
    assert counters["graph_break"]
