"""A tensor with the shape of the whole and a rank's slice of the values: what may read it, and what raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardplan.torchlib.hollow import Hollow

WHOLE = torch.Size((2, 8, 6))


def hollow(kept: Tensor) -> Hollow:
    return Hollow(kept, WHOLE, lambda x: x[:, 4:], lambda function: f"mixer: {function} computes with it")


def test_code_may_ask_for_shape_dtype_and_device() -> None:
    x = hollow(torch.randn(2, 4, 6))
    assert x.shape == x.size() == WHOLE and x.shape[:-1] == (2, 8) and x.ndim == 3 and len(x) == 2
    assert (x.dtype, x.device.type, x.is_floating_point()) == (torch.float32, "cpu", True)
    made = x.new_zeros(2, 8)
    assert type(made) is Tensor and made.dtype == x.dtype
    assert x.to(torch.float32) is x


@pytest.mark.parametrize(
    "computes",
    [
        nn.Linear(6, 3),
        lambda x: x.view(2, -1, 3),
        lambda x: x[:, -1],
        lambda x: x + 1,
        lambda x: x.sum(),
        lambda x: x * x,
        lambda x: x * torch.ones(3, 2, 8, 6),
        lambda x: torch.cat([x, torch.ones(2, 8, 6)]),
        lambda x: x.mul_(2),
        lambda x: x.clone(),
        lambda x: x.detach(),
        lambda x: torch.zeros_like(x),
    ],
)
def test_what_computes_with_it_raises(computes) -> None:
    with pytest.raises(RuntimeError, match="mixer: .* computes with it"):
        computes(hollow(torch.randn(2, 4, 6)))


@pytest.mark.parametrize("shape", [(2, 8, 1), (8, 1), (1, 8, 6), (6,), (2, 1, 6), ()])
def test_a_product_with_a_whole_value_is_that_of_the_slice(shape) -> None:
    """A padding mask, by which state space layers multiply their input."""
    whole, mask = torch.randn(WHOLE, requires_grad=True), torch.randn(shape)
    kept = whole.detach()[:, 4:].requires_grad_()
    for product in (hollow(kept) * mask, mask * hollow(kept)):
        assert type(product) is Hollow and product.shape == WHOLE
        assert product.kept.equal((whole * mask)[:, 4:])
    double = (hollow(kept) * mask).to(torch.float64)
    assert double.dtype == double.kept.dtype == torch.float64
    double.kept.sum().backward()
    (whole * mask)[:, 4:].sum().backward()
    assert kept.grad.equal(whole.grad[:, 4:])


def test_a_checkpoint_passes_it_in_again() -> None:
    layer, kept = nn.Linear(6, 6), torch.randn(2, 4, 6, requires_grad=True)
    x, seen = hollow(kept), []

    def run(given: Tensor) -> Tensor:
        seen.append(given)
        return layer(given.kept).sin()

    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert [one is x for one in seen] == [True, True]
    found, kept.grad = kept.grad, None
    layer(kept).sin().sum().backward()
    assert found.equal(kept.grad)
