"""Models of one's own, each written in another of the ways in which people write them. All take token ids and return logits,
unless they say otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 64, 32, 4, 2, 8
HEAD = WIDTH // HEADS


def ids(seed: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))}


def pictures(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


def features(name: str, seed: int) -> dict[str, Tensor]:
    return {name: torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))}


class Tokens(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, block: type[nn.Module], depth: int = DEPTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MLP(nn.Module):
    def __init__(self, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def block_of(attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module] = MLP) -> Callable[[], Block]:
    return partial(Block, attention, mlp)


class EinsumAttention(nn.Module):
    """Parameters [width, heads, head], as in JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, HEAD) / 6) for _ in range(3))
        self.o = nn.Parameter(torch.randn(HEADS, HEAD, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,dhk->bhnk", x, w) for w in (self.q, self.k, self.v))
        weights = (torch.einsum("bhnk,bhmk->bhnm", q, k) / HEAD**0.5).softmax(-1)
        return torch.einsum("bhnk,hkd->bnd", torch.einsum("bhnm,bhmk->bhnk", weights, v), self.o)


class FlatEinsumAttention(nn.Module):
    """Linear layers, and einsum between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).unbind(2)
        weights = torch.einsum("bnhd,bmhd->bhnm", q, k).div(HEAD**0.5).softmax(-1)
        return self.out(torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2))


class FusedKeyValues(nn.Module):
    """One matrix for keys and values (latent cross attention, PVT, perceivers)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.kv, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).reshape(b, n, self.num_heads, HEAD).permute(0, 2, 1, 3)
        kv = self.kv(x).reshape(b, -1, 2, self.num_heads, HEAD).permute(2, 0, 3, 1, 4)
        k, v = kv[0], kv[1]
        weights = (q @ k.transpose(-2, -1) * HEAD**-0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(LENGTH, LENGTH)))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        weights = self.query(x) @ self.key(x).transpose(-2, -1) * HEAD**-0.5
        weights = weights.masked_fill(self.tril[:n, :n] == 0, float("-inf")).softmax(-1)
        return weights @ self.value(x)


class SeparateHeads(nn.Module):
    """A module for each head, as tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class MultiQuery(nn.Module):
    """All heads of the queries read one head of keys and values, from one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        weights = (q @ k[:, None].transpose(-2, -1) * HEAD**-0.5).softmax(-1)
        return self.out((weights @ v[:, None]).transpose(1, 2).flatten(2))


class GroupedFused(nn.Module):
    """Queries, keys and values of unequal numbers of heads in one matrix, split by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv = HEADS, HEADS // 2
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * self.n_kv) * HEAD, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.wqkv(x).split([self.n_heads * HEAD, self.n_kv * HEAD, self.n_kv * HEAD], -1)
        q = q.view(b, n, self.n_heads, HEAD).transpose(1, 2)
        k, v = (t.view(b, n, self.n_kv, HEAD).transpose(1, 2) for t in (k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(x.transpose(1, 2).reshape(b, n, -1))


class Interleaved(nn.Module):
    """Queries, keys and values of each head side by side (BLOOM, GPT-NeoX)."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(x).view(*x.shape[:2], self.heads, 3, HEAD)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class NormedHeads(nn.Module):
    """Queries and keys with a norm each, and a gate on the result of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(x).tensor_split(3, -1))
        weights = ((self.q_norm(q) @ self.k_norm(k).transpose(-2, -1)) * self.temperature).softmax(-1)
        x = weights @ v * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        return self.out(x.transpose(1, 2).flatten(2))


class FusedGate(nn.Module):
    """A gated MLP with one matrix for gate and value, in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.w12(x)
        half = x.shape[-1] // 2
        return self.w3(F.silu(x[..., :half]) * x[..., half:])


class GptJ(nn.Module):
    """Attention and MLP side by side, each with matrices of its own (GPT-J)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), FlatEinsumAttention(), FusedGate()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.mlp(h)


class PostNorm(nn.Module):
    """Norms after the sums (BERT), in a block without parts."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.intermediate, self.output = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, HEAD).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        attended = ((q @ k.mT) / math.sqrt(HEAD)).softmax(-1) @ v
        x = self.norm1(x + self.dense(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.output(F.gelu(self.intermediate(x))))


class NormGPT(nn.Module):
    """nanoGPT's attention as it is written there: the width is read off the input, the heads are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoGPT(nn.Module):
    """The same with `-1` where a rank has its own heads, learned positions, tied embeddings and a loss."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.n_head, self.n_embd = HEADS, WIDTH

        def forward(self, x: Tensor) -> Tensor:
            B, T, _ = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))

    def __init__(self) -> None:
        super().__init__()
        block = block_of(NanoGPT.Attention)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(block() for _ in range(DEPTH)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Clamped(NanoGPT.Attention):
    """The same with queries, keys and values clamped together, so that they share many numbers."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q, k, v = self.c_attn(x).clamp(-1, 1).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class Titan(nn.Module):
    """torchtitan's Llama: own RMSNorm, complex rotary embeddings from a buffer, grouped keys and values, layers in a dict."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads, self.n_kv_heads, self.head_dim = HEADS, HEADS // 2, HEAD
            self.n_rep = self.n_heads // self.n_kv_heads
            self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
            self.wk, self.wv = (nn.Linear(WIDTH, self.n_kv_heads * HEAD, bias=False) for _ in range(2))
            self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
            bs, seqlen, _ = x.shape
            xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
            xq = xq.view(bs, seqlen, -1, self.head_dim)
            xk = xk.view(bs, seqlen, -1, self.head_dim)
            xv = xv.view(bs, seqlen, -1, self.head_dim)
            turn = freqs_cis[:seqlen].view(1, seqlen, 1, -1)
            xq, xk = (
                torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * turn).flatten(3)
                for t in (xq, xk)
            )
            keys, values = (
                t[:, :, :, None].expand(-1, -1, -1, self.n_rep, -1).reshape(bs, seqlen, -1, self.head_dim)
                for t in (xk, xv)
            )
            xq, keys, values = (t.transpose(1, 2) for t in (xq, keys, values))
            output = F.scaled_dot_product_attention(xq, keys, values, is_causal=True)
            return self.wo(output.transpose(1, 2).contiguous().view(bs, seqlen, -1))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = (nn.Linear(WIDTH, 64, bias=False) for _ in range(2))
            self.w2 = nn.Linear(64, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.feed_forward = Titan.Attention(), Titan.FeedForward()
            self.attention_norm, self.ffn_norm = Titan.Norm(), Titan.Norm()

        def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
            h = x + self.attention(self.attention_norm(x), freqs_cis)
            return h + self.feed_forward(self.ffn_norm(h))

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.outer(torch.arange(4 * LENGTH), 1.0 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(i): Titan.Block() for i in range(DEPTH)})
        self.norm, self.output = Titan.Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok_embeddings(ids)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


class SharedBlock(nn.Module):
    """One block, run several times (ALBERT, universal transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), block_of(FlatEinsumAttention, FusedGate)()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Experts(nn.Module):
    """Experts in a dict, each on the tokens whose best it is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleDict({name: MLP() for name in ("a", "b", "c")})

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts.values()):
            rows = best == i
            result[rows] = expert(x[rows]) * weights[rows][:, i, None]
        return result


class SoftExperts(nn.Module):
    """Every expert on every token, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleDict({name: MLP() for name in "abc"})

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts.values()))


class Vision(nn.Module):
    """A patch convolution, a class token, learned positions, pairs of attention and MLP in lists, a pool by index."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.scale = HEADS, HEAD**-0.5
            self.norm, self.attend = nn.LayerNorm(WIDTH), nn.Softmax(dim=-1)
            self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

        def forward(self, x: Tensor) -> Tensor:
            from einops import rearrange

            qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
            q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in qkv)
            out = torch.matmul(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale), v)
            return self.to_out(rearrange(out, "b h n d -> b n (h d)"))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 64),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(64, WIDTH),
                nn.Dropout(0.1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layers = nn.ModuleList(nn.ModuleList([Vision.Attention(), Vision.FeedForward()]) for _ in range(DEPTH))
        self.norm, self.mlp_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.mlp_head(self.norm(x)[:, 0])


class Windows(nn.Module):
    """Swin's attention in windows, with a table of biases [positions, heads]."""

    class Attention(nn.Module):
        def __init__(self, size: int = 2) -> None:
            super().__init__()
            self.num_heads, self.size = HEADS, size
            self.relative_position_bias_table = nn.Parameter(torch.randn((2 * size - 1) ** 2, HEADS))
            at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
            apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + size - 1
            self.register_buffer("relative_position_index", apart[..., 0] * (2 * size - 1) + apart[..., 1])
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            b, n, _ = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
            weights = (q * HEAD**-0.5) @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
            return self.proj((weights.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attn, self.mlp = Windows.Attention(), MLP()

        def forward(self, x: Tensor) -> Tensor:
            b, h, w, c = x.shape
            parts = self.norm1(x).view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
            parts = self.attn(parts).view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
            x = x + parts
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, WIDTH, 4, 4), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Windows.Block() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x).permute(0, 2, 3, 1))).mean((1, 2)))


class Buckets(nn.Module):
    """T5's attention: the first block has a table of biases [buckets, heads], and hands what it looks up to the others."""

    class Block(nn.Module):
        def __init__(self, table: bool) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.norm1, self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), MLP()
            self.bias = nn.Embedding(2 * LENGTH, HEADS) if table else None

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            n = x.shape[1]
            if self.bias is not None:
                apart = torch.arange(n)[:, None] - torch.arange(n)[None] + LENGTH
                bias = self.bias(apart).permute(2, 0, 1)[None]
            h = self.norm1(x)
            q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
            x = x + self.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm2(x)), bias

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Buckets.Block(i == 0) for i in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Crossing(nn.Module):
    """An encoder, and a decoder that reads its result: q from one, keys and values from the other."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.to_out, self.heads = nn.Linear(WIDTH, WIDTH), HEADS

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, -1)
            q, k, v = (t.reshape(t.shape[0], t.shape[1], self.heads, -1).transpose(1, 2) for t in (q, k, v))
            return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
            self.own, self.cross, self.mlp = Crossing.Attention(), Crossing.Attention(), MLP()

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            h = self.norm1(x)
            x = x + self.own(h, h)
            x = x + self.cross(self.norm2(x), context)
            return x + self.mlp(self.norm3(x))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(block_of(FusedKeyValues)() for _ in range(DEPTH))
        self.decoder = nn.ModuleList(Crossing.Decoder() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        context = x = self.embed(ids)
        for layer in self.encoder:
            context = layer(context)
        for layer in self.decoder:
            x = layer(x, context)
        return self.head(x)


class Mixer(nn.Module):
    """An MLP over the positions, and one over the features."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.channels = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), MLP()
            self.up, self.down = nn.Linear(LENGTH, 4 * LENGTH), nn.Linear(4 * LENGTH, LENGTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.down(F.gelu(self.up(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
            return x + self.channels(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.model = Tokens(Mixer.Block)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


class Slopes(nn.Module):
    """ALiBi: a number of each head in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        bias = -(at[:, None] - at[None]).abs() * self.slopes[:, None, None]
        return self.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class ComputedSlopes(Slopes):
    """ALiBi whose numbers the code computes for all heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        at, slopes = torch.arange(x.shape[1]), 2.0 ** -torch.arange(1, HEADS + 1)
        bias = -(at[:, None] - at[None]).abs() * slopes[:, None, None]
        return self.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """Two matrices, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


class Standard(nn.Module):
    """torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]
