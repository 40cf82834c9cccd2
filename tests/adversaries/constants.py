"""Live models whose code asks for a number: a layer's place, a size, a length, a mask. On the other side of the question it
computes something that is wrong on a slice."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adversary import Adversary
from .live import OPTIONS, llama
from .meshes import rows

LONG = 24


def long_rows(seed: int) -> dict[str, Any]:
    """Rows of 24 tokens."""
    ids = torch.randint(4, 64, (2, LONG), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def asking(question: str, wrong: bool, layers: int = 4) -> nn.Module:
    """An MLP that asks, and then takes off the mean over its features, or halves them."""
    model = llama(num_hidden_layers=layers)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx, layer.mlp.config = number, model.config
        layer.mlp.forward = types.MethodType((WRONG if wrong else RIGHT)[question], layer.mlp)
    return model


def _wrong(self: nn.Module, h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def _right(self: nn.Module, h: Tensor) -> Tensor:
    return h / 2


def _hidden(self: nn.Module, x: Tensor) -> Tensor:
    return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


# Each is written out, as a stranger would: what the code compares with is read from its source.
def wrong_place(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if self.layer_idx >= 2 else h)


def wrong_last(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if self.layer_idx == 3 else h)


def wrong_odd(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if self.layer_idx % 2 else h)


def wrong_length(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if x.shape[1] > 20 else h)


def wrong_rows(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if len(x) == 4 else h)


def wrong_width(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if self.gate_proj.in_features == 32 else h)


def wrong_config(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_wrong(self, h) if self.config.head_dim == 8 else h)


def right_place(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_right(self, h) if self.layer_idx >= 2 else h)


def right_length(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_right(self, h) if x.shape[1] > 20 else h)


def right_width(self: nn.Module, x: Tensor) -> Tensor:
    h = _hidden(self, x)
    return self.down_proj(_right(self, h) if self.gate_proj.in_features == 32 else h)


WRONG = {
    "place": wrong_place,
    "last": wrong_last,
    "odd": wrong_odd,
    "length": wrong_length,
    "rows": wrong_rows,
    "width": wrong_width,
    "config": wrong_config,
}
RIGHT = {"place": right_place, "length": right_length, "width": right_width}


def asking_attention(question: str) -> nn.Module:
    """The attention's own forward is wrapped by one that asks of its mask or its head size."""
    model = llama()
    for layer in model.model.layers:
        own = layer.self_attn.forward
        layer.self_attn.forward = types.MethodType(ATTENTIONS[question](own), layer.self_attn)
    return model


def of_mask(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, hidden_states: Tensor, attention_mask: Any = None, **more: Any) -> Any:
        if attention_mask is not None and self.training:
            y, *others = own(hidden_states=hidden_states, attention_mask=attention_mask, **more)
            q = self.q_proj(hidden_states)
            return (y * q.mean(), *others)
        return own(hidden_states=hidden_states, attention_mask=attention_mask, **more)

    return forward


def of_head(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, hidden_states: Tensor, **more: Any) -> Any:
        y, *others = own(hidden_states=hidden_states, **more)
        if self.head_dim == 8:
            y = y * self.q_proj(hidden_states).mean()
        return (y, *others)

    return forward


ATTENTIONS = {"mask": of_mask, "head": of_head}
LIVE: dict[str, Any] = {**OPTIONS, "codes": ("SP524",)}
INPUTS = {"length": long_rows}
CASES = (
    *(
        Adversary(
            f"constant_{name}/wrong",
            partial(asking, name, True),
            INPUTS.get(name, rows),
            "llama",
            "wrong",
            "the mean of a rank's own features, where the code asks",
            **OPTIONS,
        )
        for name in WRONG
    ),
    *(
        Adversary(
            f"constant_{name}/right",
            partial(asking, name, False),
            INPUTS.get(name, rows),
            "llama",
            "right",
            "element by element on both sides",
            **LIVE,
        )
        for name in RIGHT
    ),
    Adversary(
        "constant_mask/wrong",
        partial(asking_attention, "mask"),
        partial(rows, padded="left"),
        "llama",
        "wrong",
        "the mean of a rank's own queries, where there is a mask",
        **OPTIONS,
    ),
    Adversary(
        "constant_head/wrong",
        partial(asking_attention, "head"),
        rows,
        "llama",
        "wrong",
        "the mean of a rank's own queries, for heads of this size",
        **OPTIONS,
    ),
)
