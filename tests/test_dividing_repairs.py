"""A plan that splits heads, and leaves their numbers whole: the repair names all that the code cuts by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardplan
from tests.test_layout_fused import WIDTH, Model, Separate


class Taught(Model):
    """Blocks without gradients, as those of a model that another one trained, before a part with gradients."""

    def __init__(self) -> None:
        super().__init__(Separate)
        self.further = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.wte(ids)
            for block in self.h:
                x = block(x)
        return self.head(self.further(x))


def test_numbers_of_a_part_that_no_gradient_reaches_are_divided() -> None:
    rules = {"h.*.attn": "replicate", "h.*.attn.{q,k,v}": "colwise", "h.*.attn.c_proj": "rowwise"}
    torch.manual_seed(0)
    plan = {"version": "1", "name": "mine", "tensor_parallel": rules}
    (found,) = shardplan.validate(Taught(), plan, {"tp": 2}, proof=False).diagnostics
    assert found.help == "write `h.*.attn: {style: replicate, shares: [n_head, n_embd]}` instead of `replicate`"


@pytest.mark.slow
def test_a_divide_of_two_numbers_and_none_of_what_is_in_a_head() -> None:
    """Of the changes with which the code gets past a view, that with which it gets furthest."""
    plan = {
        "version": "1",
        "extends": "blt",
        "tensor_parallel": {"model.patcher.layers.*.self_attn": "input_with_grad_allreduce"},
    }
    (found,) = shardplan.validate("blt", plan, {"tp": 2}, proof=False).diagnostics
    assert found.code == "SP408" and "shares: [num_heads, num_key_value_heads]}`" in (found.help or "")
