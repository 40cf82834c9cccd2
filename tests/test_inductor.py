"""The backend of compiled blocks: graphs run below autograd, forward and backward."""

import shutil

import pytest
import torch
from torch import Tensor

from shardplan.runtime.apply.compilation import Inductor

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")

RUN: list[str] = []


class _Formula(torch.autograd.Function):
    """Autograd's part of the operator below: in Python, as that of torch's functional collectives is."""

    @staticmethod
    def forward(ctx, x: Tensor, direction: str) -> Tensor:
        RUN.append("autograd")
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.shardplan_test.noted(x, direction)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.shardplan_test.noted(gradient, "backward"), None


def _kernel(x: Tensor, direction: str) -> Tensor:
    RUN.append(direction)
    return x * 2


LIBRARY = torch.library.Library("shardplan_test", "DEF")
LIBRARY.define("noted(Tensor x, str direction) -> Tensor")
LIBRARY.impl("noted", _kernel, "CPU")
LIBRARY.impl("noted", lambda x, direction: torch.empty_like(x), "Meta")
LIBRARY.impl("noted", lambda x, direction: _Formula.apply(x, direction), "Autograd")


@pytest.mark.slow
def test_graphs_run_below_autograd_in_both_directions():
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(3, 4)

    def forward(x: Tensor) -> Tensor:
        return torch.ops.shardplan_test.noted(layer(x).tanh(), "forward").sin().sum()

    RUN.clear()
    expected = torch.autograd.grad(forward(x), layer.parameters())
    assert RUN == ["autograd", "forward", "autograd", "backward"]
    compiled = torch.compile(forward, backend=Inductor(), fullgraph=True)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.autograd.grad(compiled(x), layer.parameters())  # compiles both graphs
    RUN.clear()
    found = torch.autograd.grad(compiled(x), layer.parameters())
    assert RUN == ["forward", "backward"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_graph_without_operators_runs():
    """The backward of a sum of two is one: inductor hands on what there is."""
    x = torch.ones(3, requires_grad=True)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(lambda x: x + 1, backend=Inductor())(x).backward(torch.full((3,), 2.0))
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_equal_backends_share_a_graph():
    compiled = [torch.compile(_double, backend=Inductor()) for _ in range(2)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert [float(run(torch.ones(()))) for run in compiled] == [2.0, 2.0]


def _double(x: Tensor) -> Tensor:
    return x * 2
