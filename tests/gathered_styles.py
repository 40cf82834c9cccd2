"""Two styles that no plan needs yet, whose parameters are stored in shards and read whole: what every room must understand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from shardplan.styles import STYLES
from shardplan.styles.style_record import ParameterStyle

MADE = {
    name: replace(STYLES[like], name=name, aliases=(), weight=ParameterStyle("out", computed))
    for name, like, computed in (
        (
            "gathered",
            "replicate",
            "I",
        ),  # stored V, read I: gathered, and of a complete gradient each rank keeps its slice
        (
            "gathered_partial",
            "replicated_with_grad_allreduce",
            "R",
        ),  # stored V, read R: the gradient is reduce-scattered
    )
}
# Qwen3: the norms of heads on slices, those of the residual stream and the head on whole values.
PLAN = {
    "version": "1",
    "name": "gathered",
    "extends": "qwen3",
    "tensor_parallel": {
        "model.layers.*.self_attn.{q,k}_norm": "gathered_partial",
        "model.layers.*.input_layernorm": "gathered",
        "lm_head": "gathered",
    },
    "sequence_parallel": {
        "model.layers.*.input_layernorm": {"style": "gathered_partial"},
        "lm_head": "none",
    },
}


@contextmanager
def gathered_styles() -> Iterator[None]:
    """The language knows them, while the context lasts."""
    with patch.dict(STYLES, MADE):
        yield
