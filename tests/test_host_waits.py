"""Where the host waits for a device: not in clipping, once a layer for experts, and once when a plan is applied."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from expert_modules import Call, PlainExperts, a_call, distribute_experts, mesh_of_one
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.sections import ActivationCheckpointing
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply.checkpointing import checkpoint_modules
from shardplan.runtime.apply.same_weights import _beginnings
from shardplan.runtime.training import clip_grad_by_total_norm_, clip_grad_norm_

LAYERS = 3
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that wait for a device, as they are called."""
    seen: list[str] = []

    def noting(name: str) -> None:
        own = getattr(Tensor, name)

        def noted(x: Tensor, *args: object, **kwargs: object) -> object:
            seen.append(name)
            return own(x, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, noted)

    for name in READS:
        noting(name)
    return seen


def test_clipping_looks_at_no_number_of_a_device() -> None:
    """A meta tensor has none: looking would raise."""
    parameters = [nn.Parameter(torch.zeros(4, device="meta", dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    total = clip_grad_norm_(parameters, 1.0)
    assert total.is_meta and total.shape == ()
    with pytest.raises(RuntimeError, match="meta"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)  # which is asked for


@pytest.mark.parametrize(
    "norm", [torch.tensor(4.0), torch.tensor(4.0, dtype=torch.float64), 4.0], ids=["32", "64", "float"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_coefficient_is_not_rounded_to_the_gradients_dtype(norm: Tensor | float, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(4096, dtype=dtype))
    gradient = torch.randn(4096, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    parameter.grad = gradient.clone()
    clip_grad_by_total_norm_(parameter, 3.0, norm)
    exact = gradient.double() * 3.0 / (4.0 + 1e-6)
    off = (parameter.grad.double() - exact).abs() / exact.abs().clamp(min=1e-3)
    rounded = norm.dtype if isinstance(norm, Tensor) else torch.float64
    assert off.max() <= max(torch.finfo(dtype).eps, torch.finfo(rounded).eps)


def test_a_norm_within_the_limit_changes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.1, float("nan"), 0.3])
    before = parameter.grad.clone()
    clip_grad_by_total_norm_(parameter, 1.0, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_grad_by_total_norm_(parameter, 1.0, float("inf"))
    torch.testing.assert_close(parameter.grad, before, rtol=0, atol=0, equal_nan=True)
    assert ["skip this step" in str(one.message) for one in caught] == [True]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of_one() as mesh:
        yield mesh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = PlainExperts()

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return x + self.experts(x, call.ids, call.weights).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, call: Call) -> Tensor:
        x = call.tokens
        for layer in self.layers:
            x = layer(x, call)
        return x


def gradients(model: nn.Module, call: Call, reads: list[str], runs: int) -> tuple[list[Tensor], list[int]]:
    """All gradients after some backward runs on one graph, and how often forward and each of these waited."""
    call = call.fresh()
    counts, before = [], len(reads)
    result = model(call)
    for run in range(runs):
        counts.append(len(reads) - before)
        before = len(reads)
        result.backward(call.gradient, retain_graph=run < runs - 1)
    counts.append(len(reads) - before)
    return [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()] + [call.tokens.grad], counts


@pytest.mark.parametrize("mode", ["full", "selective", None])
@pytest.mark.parametrize("exchange", [None, "once", "pairs"])
def test_experts_wait_once_a_layer_and_not_under_a_checkpoint(
    mesh: DeviceMesh, reads: list[str], exchange: str | None, mode: str | None
) -> None:
    torch.manual_seed(0)
    plain, call = Stack(), a_call("mixtral", 6, 1)
    torch.manual_seed(0)
    model = Stack()
    for layer in model.layers:
        distribute_experts(layer.experts, exchange, False, mesh, mesh)
    if mode is not None:
        checkpoint_modules(model, [f"layers.{i}" for i in range(LAYERS)], ActivationCheckpointing(mode=mode), ())
    runs = 1 if mode == "selective" else 2  # torch's selective checkpoints take one
    expected, _ = gradients(plain, call, reads, runs)
    found, counts = gradients(model, call, reads, runs)
    for own, other in zip(found, expected, strict=True):
        assert relative_error(own, other) <= TOLERANCE[torch.float32]
    assert counts == [LAYERS, *[0] * runs]


def test_two_calls_of_a_checkpointed_layer_keep_their_own_sizes(mesh: DeviceMesh, reads: list[str]) -> None:
    """Two forwards, then their backwards, in the other order: other tokens go to other experts."""
    torch.manual_seed(0)
    plain = Stack()
    torch.manual_seed(0)
    model = Stack()
    for layer in model.layers:
        distribute_experts(layer.experts, "pairs", False, mesh, mesh)
    checkpoint_modules(model, [f"layers.{i}" for i in range(LAYERS)], ActivationCheckpointing(), ())
    for one in (plain, model):
        calls = [a_call("mixtral", tokens, seed).fresh() for tokens, seed in ((6, 1), (9, 2))]
        results = [one(call) for call in calls]
        for result, call in reversed(list(zip(results, calls, strict=True))):
            result.backward(call.gradient)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(getattr(own.grad, "_local_tensor", own.grad), other.grad) <= TOLERANCE[torch.float32]


def test_one_transfer_compares_all_parameters(reads: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5), nn.LayerNorm(5))
    found = _beginnings(model)
    assert found.shape == (6,) and len(set(found.tolist())) > 2
    assert reads == ["cpu", "tolist"]
