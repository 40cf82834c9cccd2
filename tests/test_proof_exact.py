"""A float64 run has no roundoff of float32 in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardplan import Model, validate
from shardplan.core.report import Comparison, Verdict
from shardplan.proof import prove
from shardplan.proof.exact import in_precision_of
from shardplan.proof.prove import settle
from shardplan.proof.steps import reference_steps
from shardplan.proof.threads import on_threads
from shardplan.torchlib.modes import CheckedSizes, meshes_made_once
from shardplan.torchlib.private import private


class Lowering(nn.Module):
    """Casts down in all the ways that models do."""

    def __init__(self, cast: str):
        super().__init__()
        self.cast = cast
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.cast == "float":
            return x.float().exp()
        if self.cast == "to":
            return x.to(torch.float32).exp()
        if self.cast == "softmax":
            return torch.softmax(x, dim=-1, dtype=torch.float32)
        return (x * torch.full((16,), 1 / 3)).exp()  # of the default dtype


@pytest.mark.parametrize("cast", ["float", "to", "softmax", "default dtype"])
def test_casts_of_a_float64_model_stay_in_float64(cast: str) -> None:
    model, x = Lowering(cast).double(), torch.linspace(0, 1, 16, dtype=torch.float64)
    output = reference_steps(copy.deepcopy(model), [{"x": x}]).outputs[0]["output"]
    assert output.dtype == torch.float64
    with torch.no_grad():
        plain = model(x).double()
    assert 0 < (plain - output).abs().max() < 1e-6, "without it there is roundoff of float32"


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 32, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 5], dtype=torch.int32)
        return F.grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends)[:5]


def test_groups_of_rows_are_multiplied_in_float64() -> None:
    model, x = Grouped(), torch.randn(6, 16, dtype=torch.float64)
    run = reference_steps(copy.deepcopy(model), [{"x": x}])
    weight = model.weight.detach().requires_grad_()
    right = torch.cat([x[:2] @ weight[0], x[2:5] @ weight[2]])
    right.square().mean().backward()
    assert torch.equal(run.outputs[0]["output"], right)
    assert (model(x).double() - right).abs().max() > 1e-3, "without it there is roundoff of bfloat16"


def by_method(loss: Tensor, x: Tensor) -> Tensor | None:
    loss.backward()
    return x.grad


def by_function(loss: Tensor, x: Tensor) -> Tensor | None:
    torch.autograd.backward(loss)
    return x.grad


def by_grad(loss: Tensor, x: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("outside", [nullcontext, CheckedSizes])
@pytest.mark.parametrize("backward", [by_method, by_function, by_grad])
def test_what_a_checkpoint_computes_again_stays_in_float64(
    backward: Callable[[Tensor, Tensor], Tensor | None], outside: Callable[[], AbstractContextManager[object]]
) -> None:
    model, gradients = Lowering("to").double(), []
    for again in (False, True):
        x = torch.linspace(0, 1, 16, dtype=torch.float64, requires_grad=True)
        with outside(), in_precision_of(model):
            output = checkpoint(model, x, use_reentrant=False) if again else model(x)
            gradients.append(backward(output.square().sum(), x))
    once, twice = gradients
    assert once is not None and twice is not None and once.dtype == torch.float64
    assert torch.equal(once, twice)


def test_a_float32_model_runs_as_it_is() -> None:
    model, x = Lowering("float"), torch.linspace(0, 1, 16)
    with in_precision_of(model):
        assert model(x.double()).dtype == torch.float32
        assert torch.get_default_dtype() == torch.float32


def test_the_default_dtype_comes_back() -> None:
    with pytest.raises(ValueError, match="no"), in_precision_of(Lowering("to").double()):
        raise ValueError("no")
    assert torch.get_default_dtype() == torch.float32


def test_a_proof_goes_to_float64_at_once_where_it_is_needed_anyway() -> None:
    ran: list[torch.dtype] = []

    def run(dtype: torch.dtype) -> tuple[Comparison, ...]:
        ran.append(dtype)
        verdict: Verdict = "differs" if dtype == torch.float32 else "equal"
        return (Comparison("loss", "output", 0.0, "rank 0", verdict, str(dtype).removeprefix("torch.")),)

    first = settle(run)
    assert (first, ran) == (settle(run, at_once=True), [torch.float32, torch.float64, torch.float64])


def features(seed: int) -> dict[str, Tensor]:
    return {"input": torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))}


class Cancelling(nn.Module):
    """Far from zero, what is left of its sums is rounding in float32."""

    def __init__(self, far: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.far = far
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) + self.far - self.far).tanh())


@pytest.mark.parametrize(("far", "dtype"), [(1e4, torch.float64), (1.0, torch.float32)])
def test_a_model_that_float32_does_not_settle_runs_in_float64_alone(
    monkeypatch: pytest.MonkeyPatch, far: float, dtype: torch.dtype
) -> None:
    run, ran = prove.Trial._rows, set()

    def counted(*given: Any) -> tuple[Comparison, ...]:
        ran.add(given[-1])
        return run(*given)

    monkeypatch.setattr(prove.Trial, "_rows", counted)
    plan = {
        "version": "1",
        "tensor_parallel": {"0": "input_with_grad_allreduce", "0.up": "colwise", "0.down": "rowwise"},
    }
    report = validate(Model(nn.Sequential(Cancelling(far)), inputs=features), plan, {"tp": 2})
    assert report.proven and ran == {dtype}, report


def test_a_mesh_of_two_is_made_once_while_ranks_are_simulated() -> None:
    def same(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        pair = [mesh["dp_shard"], mesh["tp"]]
        kind = private("DeviceMesh")
        made = kind._concatenate(pair)
        return [made is kind._concatenate(pair), made is kind._concatenate(pair[::-1]), made == mesh]

    with meshes_made_once():
        assert on_threads(4, same) == [[True, False, True]] * 4
    assert on_threads(4, same) == [[False, False, True]] * 4
