"""No gradient shares its memory with another tensor, so a second backward is added to it once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan import apply_plan
from shardplan.runtime.parallel import reading
from tests.proofs import fake_mesh


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with fake_mesh(2) as mesh:
        yield mesh


class _Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.detach()


class Part(nn.Module):
    def __init__(self, code: Callable[..., Tensor]):
        super().__init__()
        self.code = code
        self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.a, self.b, x)


class Own(nn.Module):
    """A part whose code is given, between two layers, and a second part after it."""

    def __init__(self, code: Callable[..., Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.first, self.second = Part(code), Part(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.down(self.up(x).relu())))


SHARING = {
    "sum": lambda a, b, x: a + b + x,
    "flat": lambda a, b, x: (a.flatten() + b.flatten()).view(4, 4) + x,
    "view": lambda a, b, x: a.flatten().view(4, 4) + b + x,
    "rows": lambda a, b, x: torch.cat([x, a])[4:] + b + x,
    "cat": lambda a, b, x: (torch.cat([x, a]) + torch.cat([x, b]))[4:],
    "detached": lambda a, b, x: _Detached.apply(a) + b + x,
    "detached twice": lambda a, b, x: _Detached.apply(a) + _Detached.apply(b) + x,
    "none": lambda a, b, x: a @ x @ b,
    "one": lambda a, b, x: a + x,
}


def planned(model: nn.Module, mesh) -> nn.Module:
    rules = {"up": "colwise", "down": "rowwise"}
    plan = {"version": "1", "name": "own", "tensor_parallel": rules}
    return apply_plan(model, mesh, plan, prove=False, allow_unproven=True, check_inputs=False)


def one_step(model: nn.Module, step: int) -> None:
    """Of the two parts alone: of the split layers this one rank has a part of a sum."""
    (model.second(model.first(torch.ones(4, 4))) * (step + 1)).square().sum().backward()


def gradients_of_steps(model: nn.Module) -> dict[str, Tensor]:
    """The sums of three steps. Not accumulated by autograd, which itself adds twice to two views of one gradient."""
    total: dict[str, Tensor] = {}
    for step in range(3):
        one_step(model, step)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad
                parameter.grad = None
    return total


@pytest.mark.parametrize("code", SHARING.values(), ids=SHARING)
def test_two_backwards_are_added_once(code, mesh):
    model, whole = Own(code), Own(code)
    planned(model, mesh)
    expected = gradients_of_steps(whole)
    for step in range(3):
        one_step(model, step)
    for name, total in expected.items():
        found = model.get_parameter(name).grad
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.to_local(), total)
    memory = [p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(set(memory)) == len(memory)


def test_a_gradient_that_is_retained_is_not_added_to(mesh):
    model = planned(Own(SHARING["one"]), mesh)
    x = torch.ones(4, 4)
    y = model.first.code(x, x, x).requires_grad_() * 1
    y.retain_grad()
    model.first(y).square().sum().backward()
    before = y.grad.clone()
    model.first(x).square().sum().backward()
    assert torch.equal(y.grad, before)


def test_gradients_of_their_own_are_not_copied(mesh, monkeypatch):
    """What layers compute by multiplication is theirs: a copy of each would cost its memory."""
    model = planned(Own(SHARING["none"]), mesh)
    given: list[Tensor] = []
    found: list[Tensor] = []
    real = reading.own_gradients

    def own_gradients(gradients):
        result = real(gradients)
        found.extend(result)
        given.extend(gradients)
        return result

    monkeypatch.setattr(reading, "own_gradients", own_gradients)
    model(torch.ones(4, 4)).square().sum().backward()
    assert any(one is not None for one in found) and all(a is b for a, b in zip(given, found, strict=True))
