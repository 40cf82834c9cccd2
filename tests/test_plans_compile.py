"""Per-layer torch.compile: no graph break, and one graph for all layers of a kind."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import shardplan
from shardplan.torchlib.hook_order import order_hooks
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
        activation_checkpointing={"mode": "full"} if checkpointing else False,
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


@pytest.mark.parametrize("apply", [planned, shardplan.apply_plan], ids=["program", "plan"])
def test_hooks_are_stored_in_the_order_in_which_they_run(apply, mesh):
    """Dynamo of torch 2.11 takes one hook for another where an OrderedDict and its `dict.keys` are in two orders."""
    model = reduced_model("llama", 2).build()
    apply(model, mesh, "llama", sequence_parallel=True, **({} if apply is planned else {"prove": False}))
    stored = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
    assert any(len(hooks) > 1 for hooks in stored)
    assert [list(hooks) for hooks in stored] == [list(dict.keys(hooks)) for hooks in stored]


def test_hooks_in_a_new_order_run_and_are_removed_as_before():
    seen = []
    module = torch.nn.Identity()
    module.register_forward_pre_hook(lambda module, args: seen.append("last"))
    first = module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append("first"), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(lambda module, args, out: seen.append("after"))
    module.register_forward_hook(lambda module, args, out: seen.append("before"), prepend=True)
    order_hooks(module)
    module(torch.ones(1))
    torch.compile(module, backend="eager")(torch.ones(1))
    first.remove()
    module(torch.ones(1))
    assert seen == ["first", "last", "before", "after"] * 2 + ["last", "before", "after"]
