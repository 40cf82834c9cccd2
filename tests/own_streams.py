"""Models of one's own in which more than one value runs along the blocks, or a block hands on more than its sum: biases of all heads,
states, logits of routers, vectors for each token. All take token ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.own_structures import DEPTH, HEAD, HEADS, LENGTH, MLP, VOCABULARY, WIDTH, Tokens

EXPERTS, CHOSEN, INNER = 4, 2, 48


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], heads, HEAD).transpose(1, 2)


class Projections(nn.Module):
    """The matrices of an attention that counts its heads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.num_heads = HEADS

    def states(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (by_head(matrix(x), self.num_heads) for matrix in (self.q, self.k, self.v))
        return q, k, v

    def joined(self, x: Tensor) -> Tensor:
        return self.o(x.transpose(1, 2).flatten(2))


class Biased(Projections):
    """Adds what the model computes for all heads: [heads, 1, length], or [batch * heads, 1, length]."""

    def forward(self, x: Tensor, bias: Tensor, merged: bool) -> Tensor:
        q, k, v = self.states(x)
        if not merged:
            scores = q @ k.transpose(-1, -2) / HEAD**0.5 + bias
        else:
            flat = [one.reshape(-1, LENGTH, HEAD) for one in (q, k)]
            scores = bias.baddbmm(flat[0], flat[1].transpose(-1, -2), alpha=HEAD**-0.5)
            scores = scores.view(-1, self.num_heads, LENGTH, LENGTH)
        return self.joined(scores.softmax(-1) @ v)


class Mixed(nn.Module):
    """A block with one of two kinds of attention under one name."""

    def __init__(self, attention: type[nn.Module], mlp: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class BiasedBlock(Mixed):
    def __init__(self) -> None:
        super().__init__(Biased)

    def forward(self, x: Tensor, bias: Tensor, merged: bool) -> Tensor:
        x = x + self.attn(self.norm1(x), bias, merged)
        return x + self.mlp(self.norm2(x))


class Slopes(Tokens):
    """ALiBi (arXiv 2108.12409), and a norm after the embedding."""

    def __init__(self, merged: bool) -> None:
        super().__init__(BiasedBlock)
        self.embed_norm, self.merged = nn.LayerNorm(WIDTH), merged

    def forward(self, ids: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
        bias = (slopes[:, None] * torch.arange(ids.shape[1]))[:, None]
        if self.merged:
            bias = bias.repeat(ids.shape[0], 1, 1)
        x = self.embed_norm(self.embed(ids))
        for block in self.blocks:
            x = block(x, bias, self.merged)
        return self.head(self.norm(x))


class Softmax(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(F.scaled_dot_product_attention(*self.states(x), is_causal=True))


class Retention(Projections):
    """Linear attention whose heads forget at rates of their own (arXiv 2307.08621), kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        away = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(min=0)
        rates = 1 - 2.0 ** -torch.arange(1.0, HEADS + 1)
        self.decay = nn.Buffer((rates[:, None, None] ** away).tril())
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.states(x)
        mixed = (q @ k.transpose(-1, -2) * self.decay) @ v
        return self.o(mixed.transpose(1, 2).flatten(2) * F.silu(self.gate(x)))


class Hybrid(Tokens):
    """Blocks of both kinds, one after the other."""

    def __init__(self) -> None:
        super().__init__(Mixed, depth=0)
        self.blocks.extend(map(Mixed, (Retention, Softmax)))


class Router(nn.Module):
    """Returns the numbers of each token's experts, their weights, and the logits last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.layer(x)
        weights, chosen = logits.topk(CHOSEN, dim=-1)
        return chosen, weights.softmax(-1), logits


class Stack(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return F.linear(x, self.weight[expert])


class Held(nn.Module):
    """Holds what another module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = Router(), Stack(WIDTH, 2 * INNER), Stack(INNER, WIDTH)


class Routed(Mixed):
    """A block that returns its router's logits too, for an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__(Softmax, RoutedMLP)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm1(x))
        mixed, logits = self.mlp(self.norm2(x))
        return x + mixed, logits


class RoutedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Held()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        chosen, weights, logits = self.experts.router(flat)
        mixed = torch.zeros_like(flat)
        for expert in range(EXPERTS):
            tokens, place = torch.where(chosen == expert)
            gate, up = self.experts.up(flat[tokens], expert).chunk(2, dim=-1)
            given = self.experts.down(F.silu(gate) * up, expert) * weights[tokens, place, None]
            mixed = mixed.index_add(0, tokens, given)
        return mixed.view(x.shape), logits


class Balanced(Tokens):
    """Returns logits of the tokens and of the routers."""

    def __init__(self) -> None:
        super().__init__(Routed)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, seen = self.embed(ids), []
        for block in self.blocks:
            x, logits = block(x)
            seen.append(logits)
        return self.head(self.norm(x)), torch.stack(seen)


class Stacked(nn.Module):
    """Experts; each token gets all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        given = torch.zeros_like(x)
        for expert in range(EXPERTS):
            hidden = F.gelu(F.linear(x, self.up[expert]))
            given = given + F.linear(hidden, self.down[expert]) * weights[..., expert, None]
        return given


class Closing(nn.Module):
    """Experts and a shared one, whose sum is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Stacked()
        self.shared, self.norm = MLP(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.experts(x, self.gate(x).softmax(-1)) + self.shared(x))


class Adapted(nn.Module):
    """Ends what the module before it has split, and adds an adapter of its own (X-MOD, arXiv 2205.06266)."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.down, self.up = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        x = self.dense(hidden) + residual
        return x + self.up(F.gelu(self.down(self.norm(x))))


class AdaptedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Softmax()
        self.intermediate, self.output = nn.Linear(WIDTH, 2 * WIDTH), Adapted()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return self.output(F.gelu(self.intermediate(self.norm2(x))), x)


class Twice(nn.Module):
    """Two attentions and two MLPs in lists, between norms in lists (LongCat-Flash, arXiv 2509.01322)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.attns, self.mlps = nn.ModuleList([Softmax(), Softmax()]), nn.ModuleList([MLP(), MLP()])

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = x + self.attns[number](self.norms[2 * number](x))
            x = x + self.mlps[number](self.norms[2 * number + 1](x))
        return x


class Gated(Mixed):
    """Multiplies by a vector of each token for each layer, which the model looks up once (Gemma 3n)."""

    def __init__(self) -> None:
        super().__init__(Softmax)
        self.gate, self.back = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.back(F.gelu(self.gate(x)) * vectors)


class Sides(Tokens):
    def __init__(self) -> None:
        super().__init__(Gated)
        self.vectors = nn.Embedding(VOCABULARY, DEPTH)

    def forward(self, ids: Tensor) -> Tensor:
        x, vectors = self.embed(ids), self.vectors(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, vectors[..., number, None])
        return self.head(self.norm(x))


class Connection(nn.Module):
    """Weighs a token's streams by themselves, with matrices of rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(torch.tanh(self.down(self.norm(x)))).sigmoid()


class Connected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.connection, self.attn = Connection(), Softmax()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.connection(x))
        return x + self.mlp(self.norm(x))


class Connecting(nn.Module):
    """Blocks with connections, and one after them in front of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer = nn.Embedding(VOCABULARY, WIDTH), Connection()
        self.blocks = nn.ModuleList(Connected() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mixer(x))


class TwoLists(nn.Module):
    """A table that is looked up twice, and a function of all of the sequence between two lists of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (nn.ModuleList([Mixed(Softmax)]) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.embed(ids.roll(1, 1))
        for block in self.first:
            x = block(x)
        x = torch.tanh(x)
        for block in self.second:
            x = block(x)
        return self.head(self.norm(x))
