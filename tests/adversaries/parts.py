"""Parts that the adversaries are built of, and rules for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, LENGTH, HEADS = 16, 32, 8, 4


def features(seed: int) -> dict[str, Tensor]:
    """`x` [2, LENGTH, WIDTH]."""
    return {"x": torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))}


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class Mlp(nn.Module):
    """Two matrices."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = linear(width, hidden, bias), linear(hidden, width, bias)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class Attention(nn.Module):
    """Causal attention with grouped heads, with norms of the queries and keys if that is said."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, groups: int = HEADS, norm: bool = False) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, groups * self.size), linear(width, groups * self.size)
        self.q_norm = nn.RMSNorm(self.size) if norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.size) if norm else nn.Identity()

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        q, k = self.q_norm(self.heads(self.q(x))), self.k_norm(self.heads(self.k(other)))
        v = self.heads(self.v(other))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=other is x, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(y.transpose(1, 2).flatten(-2))


class MlpBlock(nn.Module):
    """A residual stream around an MLP of some class."""

    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp() if mlp is None else mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, attn: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention() if attn is None else attn
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp() if mlp is None else mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Layers, one after the other, and a norm."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(WIDTH)

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Any:
        return self.trunk(x)


# Rules, right ones. MLP_DOOR is the same with the block's input moved once, for code that reads it itself.
MLP = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
BLOCK_INPUT = "input_with_grad_allreduce"
PARTIAL = "replicated_with_grad_allreduce"
MLP_DOOR = {"layers.*.mlp": BLOCK_INPUT, **MLP}
ATTENTION = {"layers.*.attn.{q,k,v}": "colwise", "layers.*.attn.o": "rowwise"}
ATTENTION_NORMS = {**ATTENTION, "layers.*.attn.{q,k}_norm": PARTIAL}
LAST_NORM = {"norm": {"style": "sequence_parallel", "output": "gather"}}
# The sequence-parallel overlays that go with them.
MLP_SEQUENCE = {
    "layers.0": "split_seq_input",
    "layers.*.norm": "sequence_parallel",
    "layers.*.mlp": "gather_seq_input",
    "layers.*.mlp.down": "rowwise_seq",
    **LAST_NORM,
}
BLOCK_SEQUENCE = {
    "layers.0": "split_seq_input",
    "layers.*.norm{1,2}": "sequence_parallel",
    "layers.*.{attn,mlp}": "gather_seq_input",
    "layers.*.attn.o": "rowwise_seq",
    "layers.*.mlp.down": "rowwise_seq",
    **LAST_NORM,
}


def without(rules: dict[str, Any], *names: str) -> dict[str, Any]:
    """The rules but those."""
    assert all(name in rules for name in names), names
    return {name: rule for name, rule in rules.items() if name not in names}
