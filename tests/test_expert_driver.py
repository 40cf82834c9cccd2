"""The driver of distributed experts in one process: which calls it takes, what the module's forward sees, what runs on a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from expert_modules import (
    EXPERTS,
    HIDDEN,
    KINDS,
    Call,
    PlainExperts,
    a_call,
    distribute_experts,
    experts_module,
    mesh_of_one,
    program,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.parallel import collectives, own_experts
from shardplan.runtime.parallel.expert_calls import expert_call
from shardplan.runtime.parallel.expert_rows import add_up, take
from shardplan.runtime.parallel.expert_turns import watch_experts
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.own_experts import OwnExperts
from shardplan.runtime.parallel.regime import Regime
from shardplan.torchlib.private import private

EXCHANGES = [None, "once", "pairs"]


@pytest.fixture(scope="module")
def mesh():
    with mesh_of_one() as mesh:
        yield mesh


TOKENS, IDS, WEIGHTS = torch.randn(5, 8), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)


def test_roles_are_found_in_any_order_and_by_keyword():
    for args, kwargs in (
        ((TOKENS, IDS, WEIGHTS), {}),
        ((TOKENS, WEIGHTS, IDS), {}),
        ((TOKENS,), {"routing_weights": WEIGHTS, "router_indices": IDS.int()}),
        ((), {"hidden_states": TOKENS, "unused": None, "top_k_weights": WEIGHTS, "top_k_index": IDS}),
    ):
        call = expert_call("experts", args, kwargs)
        assert (
            call.tokens.data_ptr() == TOKENS.data_ptr() and torch.equal(call.ids, IDS) and call.weights.shape == (5, 2)
        )
        new_args, new_kwargs = call.with_rows(*(rows := (torch.zeros(1, 8), torch.zeros(1, 1), torch.ones(1, 1))))
        assert len(new_args) == len(args) and list(new_kwargs) == list(kwargs)
        before = [*args, *kwargs.values()]
        for old, new in zip(before, [*new_args, *new_kwargs.values()], strict=True):
            if old is None:
                assert new is None
            else:
                found = [x.data_ptr() == old.data_ptr() for x in (call.tokens, call.ids, call.weights)]
                assert new is rows[found.index(True)]


def test_leading_dims_are_flattened():
    call = expert_call("experts", (torch.randn(2, 3, 8), torch.zeros(2, 3, 2).int(), torch.rand(2, 3, 2)), {})
    assert call.tokens.shape == (6, 8) and call.ids.shape == call.weights.shape == (6, 2) and call.shape == (2, 3, 8)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((TOKENS, WEIGHTS), "no integer tensors"),
        ((TOKENS,), "no integer tensors"),
        ((TOKENS, IDS > 1, WEIGHTS), "no integer tensors"),
        ((TOKENS, IDS, IDS, WEIGHTS), "2 integer tensors"),
        ((TOKENS, IDS), "no tensor can be its weights"),
        ((TOKENS, IDS[:, :1], WEIGHTS), "no tensor can be its weights"),
        ((TOKENS[:, :2], IDS, WEIGHTS), "2 tensors can be its weights"),
        ((TOKENS, IDS, WEIGHTS, torch.rand(3)), "besides ids and weights it has 2 tensors"),
        ((IDS, WEIGHTS), "besides ids and weights it has no tensors"),
        ((TOKENS[:4], IDS, WEIGHTS), "each token needs a list of ids"),
        ((TOKENS.view(1, 5, 8), IDS, WEIGHTS), "each token needs a list of ids"),
        ((TOKENS[0], IDS[0], WEIGHTS[0]), "each token needs a list of ids"),
        ((TOKENS, IDS, WEIGHTS, 4), "its argument 3 is a int"),
    ],
)
def test_other_calls_are_refused(args, why):
    with pytest.raises(ValueError, match=rf"the call of layer\.experts is different: .*{why}"):
        expert_call("layer.experts", args, {})


def test_rows_are_taken_and_added_up():
    """Each is the other's transpose."""
    slots = torch.randperm(12)[:7]
    tokens, rows = torch.randn(4, 5, dtype=torch.double), torch.randn(7, 5, dtype=torch.double)
    expected = torch.zeros(4, 5, dtype=torch.double).index_add(0, slots // 3, rows)
    torch.testing.assert_close(add_up(rows, slots, 4, 3), expected)
    assert torch.equal(take(tokens, slots, 3), tokens[slots // 3])
    assert torch.autograd.gradcheck(lambda x: take(x, slots, 3), tokens.requires_grad_(), check_undefined_grad=False)
    assert torch.autograd.gradcheck(lambda x: add_up(x, slots, 4, 3), rows.requires_grad_())
    assert take(tokens, slots[:0], 3).shape == (0, 5) and not add_up(rows[:0], slots[:0], 4, 3).any()


def step(module, call, checkpointed=False):
    """The result and all gradients."""
    call = call.fresh()
    arguments = (call.tokens, call.ids, call.weights)
    result = checkpoint(module, *arguments, use_reentrant=False) if checkpointed else module(*arguments)
    result.backward(call.gradient)
    gradients = {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in module.named_parameters()}
    return {"result": result.detach(), "tokens": call.tokens.grad, "weights": call.weights.grad, **gradients}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_the_module(mesh, kind, exchange):
    for implementation, checkpointed in (("eager", True), ("grouped_mm", False), ("batched_mm", False)):
        module, call = experts_module(kind, implementation), a_call(kind, 9, 1)
        reference = step(module, call)
        module = experts_module(kind, implementation)
        distribute_experts(module, exchange, False, mesh, mesh)
        for name, value in step(module, call, checkpointed).items():
            assert relative_error(value, reference[name]) <= TOLERANCE[torch.float32], (implementation, name)


def wrapped(module, exchange, mesh):
    wrap_forward(module, OwnExperts({"tp": program(module, exchange)}, Regime("tp"), mesh, mesh))
    return module


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_module_sees_rows_and_is_left_as_it_was(mesh, exchange):
    module, call = wrapped(PlainExperts(), exchange, mesh), a_call("mixtral", 6, 1)
    result = module(call.tokens.view(2, 3, HIDDEN), call.ids.view(2, 3, 2), top_k_weights=call.weights.view(2, 3, 2))
    assert result.shape == (2, 3, HIDDEN)
    assert module.seen == [(EXPERTS, 1, 12, HIDDEN, 1, 12, 1, 1, 12, 1)] and module.num_experts == EXPERTS
    module.num_experts = 5
    with pytest.raises(ValueError, match=r"layer\.experts has num_experts=5, but its plan is for 8 experts"):
        module(call.tokens, call.ids, call.weights)
    assert module.num_experts == 5


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_of_every_dtype(mesh, exchange, dtype):
    torch.manual_seed(0)
    module, call = PlainExperts(), a_call("mixtral", 6, 1)
    expected = module(call.tokens, call.ids, call.weights)
    seen = []
    own_forward = module.forward
    module.forward = lambda x, ids, weights: seen.append(ids.dtype) or own_forward(x, ids, weights)
    result = wrapped(module, exchange, mesh)(call.tokens, call.ids.to(dtype), call.weights)
    torch.testing.assert_close(result, expected)
    assert seen == [dtype], "a forward that was set on the instance runs, with ids of the call's dtype"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_without_rows_the_module_does_not_run(mesh, exchange):
    module = wrapped(PlainExperts(), exchange, mesh)
    values = step(module, a_call("mixtral", 0, 1))
    assert module.seen == [] and values["result"].shape == (0, HIDDEN) == values["tokens"].shape
    assert values["scale"].shape == (EXPERTS,) and not values["scale"].any()
    with torch.no_grad():
        assert not module(*(getattr(a_call("mixtral", 0, 1), x) for x in ("tokens", "ids", "weights"))).requires_grad


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_dtypes_are_the_modules_own(mesh, exchange, implementation):
    """bfloat16 tokens and experts, float32 weights, as routers compute them."""
    whole, module = (experts_module("mixtral", implementation).bfloat16() for _ in range(2))
    distribute_experts(module, exchange, False, mesh, mesh)
    call = a_call("mixtral", 9, 1)
    call = Call(call.tokens.bfloat16(), call.ids, call.weights, call.gradient.bfloat16())
    reference = step(whole, call)
    for name, value in step(module, call).items():
        assert value.dtype == reference[name].dtype == (torch.float32 if name == "weights" else torch.bfloat16)
        assert relative_error(value, reference[name]) <= 2**-6, name


class Other(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x, ids, weights):
        return {"tuple": (x, None), "wide": torch.cat([x, x], 1), "half": x.bfloat16()}[self.what]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_wrong_ids_and_results_are_refused(mesh, exchange):
    call = a_call("mixtral", 6, 1)
    for wrong in (-1, EXPERTS, 1000):
        ids = call.ids.clone()
        ids[2, 1] = wrong
        with pytest.raises(ValueError, match=r"layer\.experts was called with 1 expert ids outside of 0 to 7"):
            wrapped(PlainExperts(), exchange, mesh)(call.tokens, ids, call.weights)
    for what, words in (("tuple", "a tuple"), ("wide", r"\[12, 32\] in float32"), ("half", r"\[12, 16\] in bfloat16")):
        with pytest.raises(ValueError, match=rf"\[12, 16\] in float32, but layer\.experts returns {words}"):
            wrapped(Other(what), exchange, mesh)(call.tokens, call.ids, call.weights)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_second_derivatives_are_refused(mesh, exchange):
    call = a_call("mixtral", 6, 1).fresh()
    result = wrapped(PlainExperts(), exchange, mesh)(call.tokens, call.ids, call.weights)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(result.sum(), call.tokens, create_graph=True)


# They wait for the device, or are in torch's list of operators that are nondeterministic on CUDA. (index_copy is, for duplicates.)
WAITS = {"nonzero", "bincount", "masked_select", "_unique2", "unique_dim", "item", "histc", "is_nonzero"}
UNORDERED = {"index_add", "index_put", "scatter_add", "scatter", "scatter_reduce", "put", "cumsum", "index"}


class Operators(private("TorchDispatchMode")):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.rstrip("_").lstrip("_")
        integers = all(not x.is_floating_point() for x in args if isinstance(x, torch.Tensor))
        if not (integers and name in {"cumsum", "index"}):
            self.seen.add(name)
        if name == "repeat_interleave" and not kwargs.get("output_size"):
            self.seen.add("repeat_interleave without a size")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_device_is_waited_for_once_and_sums_have_an_order(mesh, exchange, monkeypatch):
    calls = []
    tolist, run = torch.Tensor.tolist, collectives._run
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: calls.append("tolist") or tolist(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: calls.append("item"))

    def counted(operator, x, *args):
        calls.append(str(x.dtype))
        return run(operator, x, *args)

    monkeypatch.setattr(collectives, "_run", counted)
    module, call = wrapped(PlainExperts(), exchange, mesh), a_call("mixtral", 6, 1).fresh()
    with Operators() as operators:
        result = module(call.tokens, call.ids, call.weights)
        forward = list(calls)
        result.backward(call.gradient)
    assert {"index_copy", "index_select"} <= operators.seen, "operators are seen"
    assert not operators.seen & (WAITS | UNORDERED | {"repeat_interleave without a size"})
    rows, ids = "torch.float32", "torch.int32"
    exchanges = {None: [], "once": [rows, rows, ids, rows], "pairs": [rows, rows]}[exchange]
    assert forward == (["torch.int64"] if exchange else []) + ["tolist", *exchanges]
    assert calls[len(forward) :] == [x for x in exchanges if x == rows]


def test_torch_compile_breaks_its_graph_at_the_experts(mesh):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = experts_module("qwen3_moe")

        def forward(self, x, ids, weights):
            return self.experts(x * 2, ids, weights) + x

    call = a_call("qwen3_moe", 9, 1)
    reference = step(Block(), call)
    block = Block()
    distribute_experts(block.experts, "once", False, mesh, mesh)
    try:
        for name, value in step(torch.compile(block, backend=backend), call).items():
            name = name.removeprefix("_orig_mod.")
            assert relative_error(value, reference[name]) <= TOLERANCE[torch.float32], name
        assert len(graphs) >= 2
        with pytest.raises(Exception, match="how many rows an expert has depends on data"):
            torch.compile(block, backend=backend, fullgraph=True)(call.tokens, call.ids, call.weights)
    finally:
        torch._dynamo.reset()


def test_an_exchange_needs_no_tp_mesh(mesh):
    module, call = PlainExperts(), a_call("mixtral", 6, 1)
    driver = OwnExperts({"tp": program(module, "once")}, Regime("tp"), None, mesh)
    wrap_forward(module, driver)
    module(call.tokens, call.ids, call.weights)
    assert driver.calls == 1


def test_a_rank_that_is_absent_gathers_the_module_as_those_that_call_it(monkeypatch):
    """Under FSDP2 those wait for its parameters first."""
    done = list[str]()

    class Unit(nn.Linear):
        def unshard(self):
            done.append("unshard")

        def reshard(self):
            done.append("reshard")

    monkeypatch.setattr(own_experts, "FSDPModule", Unit)
    monkeypatch.setattr(
        own_experts, "Ranks", lambda *args: SimpleNamespace(say_absent=lambda *said: done.append("said"))
    )
    two = SimpleNamespace(size=lambda: 2, get_group=lambda: None, get_local_rank=lambda: 0)
    driver = OwnExperts({"tp": program(PlainExperts(), "once")}, Regime("tp"), None, two)
    driver.say_absent(Unit(2, 2))
    driver.say_absent(nn.Linear(2, 2))
    assert done == ["unshard", "said", "reshard", "said"] and driver.calls == 2


def test_experts_in_a_block_that_is_not_called_are_absent_where_the_model_ends():
    said = list[nn.Module]()
    experts = nn.Linear(2, 2)
    exchange = SimpleNamespace(calls=0, say_absent=said.append)
    block = nn.ModuleDict({"experts": experts})
    block.forward = lambda x: x
    model = nn.ModuleDict({"block": block})
    model.forward = lambda x, called: block(x) if called else x
    watch_experts(model, lambda module: exchange if module is experts else None)
    model(TOKENS, called=False)
    assert said == [experts]
    model(TOKENS, called=True)  # the block and the model: a real exchange counts the first
    assert said == [experts] * 3
