"""Communication of a layer at real dimensions, exactly: on the meta device, every collective with its real size."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.collectives import of_a_layer
from benchmarks.ways import SHAPES, planned, stock_sp, stock_tp

SIZES = ((1, 2048), (8, 4096), (1, 65536))


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("shape", ["8B", "405B"])
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_a_layer_sends_the_minimum_whatever_its_shape(sp, shape, tp):
    """8 A (n - 1)/n bytes, A those of an activation; with the sequence split also the gradients of two norms."""
    expected = {"reduce_scatter": 4, "all_gather": 4, "all_reduce": 1} if sp else {"all_reduce": 4}
    hidden = SHAPES[shape]["hidden_size"]
    found = of_a_layer(partial(planned, sp=sp), tp, SHAPES[shape], SIZES)
    for (batch, tokens), (counts, ratio) in zip(SIZES, found, strict=True):
        assert counts == expected
        norms = 2 * 2 * hidden / (8 * batch * tokens * hidden) if sp else 0
        assert ratio == pytest.approx(1 + norms, rel=1e-12)


def test_what_torchs_styles_send_is_more():
    """So the count sees it: 7 all-reduces; and with the sequence split what DTensor chooses, which depends on the shape."""
    ((counts, ratio),) = of_a_layer(stock_tp, 2, SHAPES["8B"], SIZES[:1])
    assert counts == {"all_reduce": 7} and ratio == pytest.approx(7 / 4)
    ((_, few),) = of_a_layer(stock_sp, 2, SHAPES["8B"], SIZES[:1])
    assert few > 2
