"""A plan that splits heads, and leaves their numbers whole: the repair names all that the code cuts by."""

from __future__ import annotations

import pytest

import shardplan


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
