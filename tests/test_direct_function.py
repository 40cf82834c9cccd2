"""Our autograd functions are called without the Python code of `Function.apply`, and are still what that code makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardplan.model.reduced.functions import functions_of
from shardplan.torchlib.direct_function import DirectFunction


class Doubled(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


def test_it_has_its_own_gradient():
    x = torch.ones(3, requires_grad=True)
    y = Doubled.apply(x, "so")
    y.sum().backward()
    assert torch.equal(y, torch.full((3,), 2.0)) and torch.equal(x.grad, torch.full((3,), 2.0))


def test_a_transform_says_what_is_missing():
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.func.vmap(lambda x: Doubled.apply(x, "so"))(torch.ones(3))


def test_a_call_is_recorded_as_one_operation():
    seen: list[str] = []

    class Names:
        def applied_function(self, name: str, call: Any, args: tuple, kwargs: dict) -> Any:
            seen.append(name)
            return call(*args, **kwargs)

    with functions_of(Names()):  # type: ignore[arg-type]
        Doubled.apply(torch.ones(3), "so")
    assert seen == ["Doubled"]
