"""Attentions of decoders, in the ways in which public code writes them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.own_structures import DEPTH, HEAD, HEADS, LENGTH, MLP, VOCABULARY, WIDTH, Tokens

from .hand import Own, attention, decoder, own

GROUPS = HEADS // 2
QKVO = "attention.{q,k,v}: colwise\nattention.o: rowwise\n"


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def angles(size: int = HEAD, length: int = LENGTH) -> Tensor:
    return torch.outer(torch.arange(length).float(), 100.0 ** -(torch.arange(0, size, 2) / size))


class Four(nn.Module):
    """q, k, v and o, and heads by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear() for _ in range(4))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def joined(self, x: Tensor) -> Tensor:
        return self.o(x.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """llama2.c's attention: numbers of heads as attributes, rotary tables of cosines and sines, keys and values repeated by `expand`."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = HEADS, GROUPS, HEAD
        self.n_rep = HEADS // GROUPS
        self.wq, self.wk, self.wv = linear(), linear(WIDTH, GROUPS * HEAD), linear(WIDTH, GROUPS * HEAD)
        self.wo = linear()
        self.register_buffer("mask", torch.full((1, 1, LENGTH, LENGTH), float("-inf")).triu(1))
        self.register_buffer("freqs_cos", angles().cos())
        self.register_buffer("freqs_sin", angles().sin())

    def turned(self, x: Tensor) -> Tensor:
        real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = (t[: x.shape[1]].view(1, x.shape[1], 1, -1) for t in (self.freqs_cos, self.freqs_sin))
        return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).flatten(3)

    def repeated(self, x: Tensor) -> Tensor:
        bs, slen, n_kv_heads, head_dim = x.shape
        x = x[:, :, :, None, :].expand(bs, slen, n_kv_heads, self.n_rep, head_dim)
        return x.reshape(bs, slen, n_kv_heads * self.n_rep, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_local_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xq, xk = self.turned(xq), self.turned(xk)
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, self.repeated(xk), self.repeated(xv)))
        scores = torch.matmul(xq, xk.transpose(2, 3)) / self.head_dim**0.5 + self.mask[:, :, :seqlen, :seqlen]
        output = torch.matmul(scores.softmax(-1), xv)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class InPlace(Four):
    """Rotary embeddings of half of the features of each head, written in place (GPT-NeoX)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.contiguous() for t in self.heads(x))
        turn = angles(HEAD // 2, x.shape[1]).repeat(1, 2)
        for t in (q, k):
            part = t[..., : HEAD // 2].clone()
            other = torch.cat([-part[..., HEAD // 4 :], part[..., : HEAD // 4]], -1)
            t[..., : HEAD // 2] = part * turn.cos() + other * turn.sin()
        return self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class EveryTwo(Four):
    """Rotary embeddings of pairs of neighbours, with tables that are repeated (GPT-J); heads are counted by the code's own constant."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = HEADS
        self.register_buffer("embed_positions", torch.cat([angles().sin(), angles().cos()], -1), persistent=False)

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view((*x.size()[:-1], self.num_attention_heads, HEAD))

    def turned(self, x: Tensor) -> Tensor:
        sin, cos = self.embed_positions[: x.shape[1]].chunk(2, -1)
        sin, cos = (t.repeat_interleave(2, -1)[None, :, None] for t in (sin, cos))
        every_two = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), -1).flatten(-2)
        return x * cos + every_two * sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(f(x)) for f in (self.q, self.k, self.v))
        q, k = self.turned(q).permute(0, 2, 1, 3), self.turned(k).permute(0, 2, 1, 3)
        weights = (q @ k.transpose(-1, -2) / HEAD**0.5).masked_fill(mask(x.shape[1]), torch.finfo(x.dtype).min)
        mixed = (weights.softmax(-1) @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3).contiguous()
        return self.o(mixed.view((*mixed.size()[:-2], self.num_attention_heads * HEAD)))


def mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class Memories(Four):
    """Learned keys and values of each head in front of the others (x-transformers), and a scale of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.mem_k, self.mem_v = (nn.Parameter(torch.randn(HEADS, 2, HEAD)) for _ in range(2))
        self.qk_scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k = torch.cat([self.mem_k.expand(len(x), -1, -1, -1), k], 2)
        v = torch.cat([self.mem_v.expand(len(x), -1, -1, -1), v], 2)
        q, k = F.normalize(q, dim=-1) * self.qk_scale, F.normalize(k, dim=-1)
        return self.joined((q @ k.mT).softmax(-1) @ v)


class Skewed(Four):
    """Embeddings of distances that all heads read, shifted into place (music transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.er = nn.Parameter(torch.randn(LENGTH, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        n = x.shape[1]
        away = F.pad(q @ self.er[LENGTH - n :].transpose(0, 1), (1, 0))
        away = away.reshape(away.shape[0], away.shape[1], n + 1, n)[:, :, 1:]
        scores = (q @ k.mT + away) / HEAD**0.5
        return self.joined(scores.masked_fill(mask(n), float("-inf")).softmax(-1) @ v)


class Relative(nn.Module):
    """Transformer-XL: distances through a matrix of their own, and two biases [heads, head]."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.d_head = HEADS, HEAD
        self.qkv_net, self.r_net, self.o_net = linear(WIDTH, 3 * WIDTH), linear(), linear()
        self.r_w_bias, self.r_r_bias = (nn.Parameter(torch.randn(HEADS, HEAD)) for _ in range(2))
        self.register_buffer("r", torch.cat([angles(WIDTH).sin(), angles(WIDTH).cos()], -1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = torch.chunk(self.qkv_net(x), 3, dim=-1)
        q, k, v = (t.view(b, n, self.n_head, self.d_head) for t in (q, k, v))
        r = self.r_net(self.r[:n]).view(n, self.n_head, self.d_head)
        content = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        places = torch.einsum("bind,jnd->bnij", q + self.r_r_bias, r)
        places = F.pad(places, (1, 0)).view(b, -1, n + 1, n)[:, :, 1:]
        weights = ((content + places) / self.d_head**0.5).masked_fill(mask(n), float("-inf")).softmax(-1)
        mixed = torch.einsum("bnij,bjnd->bind", weights, v)
        return self.o_net(mixed.contiguous().view(b, n, self.n_head * self.d_head))


class Talking(Four):
    """Heads that are mixed before the softmax and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = linear(HEADS, HEADS), linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = self.before((q @ k.mT / HEAD**0.5).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        return self.joined(self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v)


class Latent(nn.Module):
    """Latent attention (DeepSeek-V2): queries, keys and values through narrow matrices, rotary parts that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.nope, self.rope, self.rank = HEADS, 8, 4, 12
        self.wq_a, self.q_norm, self.wq_b = linear(WIDTH, 16), nn.RMSNorm(16), linear(16, HEADS * 12)
        self.wkv_a, self.kv_norm = linear(WIDTH, self.rank + self.rope), nn.RMSNorm(self.rank)
        self.wkv_b, self.wo = linear(self.rank, HEADS * 16), linear(HEADS * 8, WIDTH)

    def turned(self, x: Tensor) -> Tensor:
        turn = angles(self.rope, x.shape[1])[:, None]
        one, two = x.chunk(2, -1)
        return torch.cat([one * turn.cos() - two * turn.sin(), one * turn.sin() + two * turn.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, n, self.n_heads, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], -1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.rank, self.rope], -1)
        q_pe, k_pe = self.turned(q_pe), self.turned(k_pe.unsqueeze(2))
        kv = self.wkv_b(self.kv_norm(kv)).view(b, n, self.n_heads, -1)
        k_nope, v = torch.split(kv, [self.nope, 8], -1)
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], -1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) / 12**0.5
        return self.wo(torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v).flatten(2))


class Blocks(nn.Module):
    """Queries, values and keys in blocks of heads (CodeGen, written for four devices)."""

    def __init__(self) -> None:
        super().__init__()
        self.mp_num, self.num_heads, self.head_dim = 2, HEADS, HEAD
        self.qkv_proj, self.out_proj = linear(WIDTH, 3 * WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        blocks = self.qkv_proj(x).reshape(b, n, self.mp_num, -1)
        q, v, k = torch.split(blocks, blocks.shape[-1] // 3, -1)
        q, k, v = (t.reshape(b, n, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(b, n, -1))


class ByGroups(nn.Module):
    """The queries of a group, its key and its value next to each other (InternLM2, Falcon)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_groups, self.head_dim = HEADS // GROUPS, HEAD
        self.wqkv, self.wo = linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD), linear()

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        fused = self.wqkv(x).view(b, n, -1, 2 + self.num_key_value_groups, self.head_dim)
        q = fused[..., : self.num_key_value_groups, :].flatten(2, 3).transpose(1, 2)
        k, v = (fused[..., i, :].repeat_interleave(self.num_key_value_groups, 2).transpose(1, 2) for i in (-2, -1))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class KeysFirst(nn.Module):
    """Keys, queries and values in one matrix, keys first, cut by slices; heads by `stack` and `movedim`."""

    def __init__(self) -> None:
        super().__init__()
        self.kqv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.kqv(x)
        size = fused.size(-1) // 3
        k, q, v = fused[..., :size], fused[..., size : 2 * size], fused[..., 2 * size :]
        q, k, v = torch.stack([q, k, v]).unflatten(-1, (-1, HEAD)).movedim(-2, 2)
        weights = torch.einsum("bhid,bhjd->bhij", q * HEAD**-0.5, k).softmax(-1)
        return self.out(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(-2))


class WholeNorms(nn.Module):
    """A norm over the queries of all heads and one over the keys (OLMo 2), before they are cut into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear() for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Differential(nn.Module):
    """Two softmaxes, one taken off the other (arXiv 2410.05258): vectors that all heads read, a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = GROUPS, HEAD
        self.q, self.k, self.v, self.o = (linear() for _ in range(4))
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.randn(HEAD) / 9) for _ in range(4)
        )
        self.subln = nn.RMSNorm(2 * HEAD, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.size()
        q, k = (f(x).view(b, n, 2 * self.num_heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k))
        v = self.v(x).view(b, n, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        weights = (q * self.head_dim**-0.5 @ k.mT + torch.full((n, n), float("-inf")).triu(1)).softmax(-1)
        first = torch.exp((self.lambda_q1 * self.lambda_k1).sum())
        share = first - torch.exp((self.lambda_q2 * self.lambda_k2).sum()) + 0.2
        weights = weights.view(b, self.num_heads, 2, n, n)
        mixed = self.subln((weights[:, :, 0] - share * weights[:, :, 1]) @ v) * 0.8
        return self.o(mixed.transpose(1, 2).reshape(b, n, -1))


class Conv1D(nn.Module):
    """GPT-2's: a matrix [inputs, outputs], and addmm."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 6), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2(nn.Module):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_head, self.split_size = HEADS, WIDTH
            self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
            self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.c_attn(x).split(self.split_size, dim=2)
            q, k, v = (t.view(*t.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) for t in (q, k, v))
            n = x.shape[1]
            scores = (q @ k.mT / HEAD**0.5).masked_fill(self.bias[:, :, :n, :n] == 0, -1e10)
            mixed = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).contiguous()
            return self.c_proj(mixed.view(*mixed.shape[:2], -1))

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), GPT2.Attention()
        self.c_fc, self.c_proj = Conv1D(4 * WIDTH, WIDTH), Conv1D(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Lambda(nn.Module):
    """minGPT's block: the MLP is a dict of modules and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), KeysFirst()
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH), "act": nn.GELU()}
        )
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class PaLM(nn.Module):
    """All that attention and a gated MLP read is one matrix, with one head of keys and values in it; two matrices give the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.dim_head, self.ff = HEADS * HEAD, HEAD, 2 * WIDTH
        self.fused = linear(WIDTH, self.inner + 2 * self.dim_head + 2 * self.ff)
        self.attn_out, self.ff_out = linear(), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.inner, self.dim_head, self.dim_head, self.ff, self.ff)
        q, k, v, ff, gate = self.fused(self.norm(x)).split(sizes, dim=-1)
        q = q.unflatten(-1, (-1, HEAD)).transpose(1, 2)
        scores = torch.einsum("bhid,bjd->bhij", q * HEAD**-0.5, k).masked_fill(mask(x.shape[1]), float("-inf"))
        mixed = torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v).transpose(1, 2).flatten(2)
        return x + self.attn_out(mixed) + self.ff_out(F.silu(gate) * ff)


class Wide(nn.Module):
    """ViT-22B's parallel block, with the lengths as numbers of the module, and one matrix after both."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp_dim, self.inner_dim, self.num_heads = 4 * WIDTH, WIDTH, HEADS
        self.norm, self.linear1, self.linear2 = nn.LayerNorm(WIDTH), linear(WIDTH, 7 * WIDTH), linear(5 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv, up = self.linear1(self.norm(x)).split([3 * self.inner_dim, self.mlp_dim], -1)
        q, k, v = qkv.view(*qkv.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.linear2(torch.cat([mixed, F.gelu(up)], 2))


class Sandwich(nn.Module):
    """Norms before each part and after it, capped scores, a window (Gemma 2)."""

    class Attention(Four):
        def __init__(self) -> None:
            super().__init__()
            self.sliding_window = 4

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            scores = torch.tanh(q @ k.mT / HEAD**0.5 / 50) * 50
            at = torch.arange(x.shape[1])
            seen = (at[:, None] >= at) & (at[:, None] - at < self.sliding_window)
            return self.joined(scores.masked_fill(~seen, -1e9).softmax(-1) @ v)

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.RMSNorm(WIDTH) for name in ("a", "b", "c", "d")})
        self.attention, self.mlp = Sandwich.Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms["b"](self.attention(self.norms["a"](x)))
        return x + self.norms["d"](self.mlp(self.norms["c"](x)))


class Capped(Tokens):
    """Scales its embedding, and caps its logits, which the embedding's own matrix gives."""

    def __init__(self) -> None:
        super().__init__(Sandwich)
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return torch.tanh(F.linear(self.norm(x), self.embed.weight) / 30) * 30


class Medusa(Tokens):
    """Further heads, for the tokens after the next: a residual each in front of a matrix."""

    def __init__(self) -> None:
        super().__init__(partial(ByItself, EveryTwo))
        self.residuals = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(linear(WIDTH, VOCABULARY) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        further = [head(x + F.silu(residual(x))) for head, residual in zip(self.heads, self.residuals, strict=True)]
        return torch.stack([self.head(x), *further])


class ByItself(nn.Module):
    """A block of attention, and an MLP in a Sequential."""

    def __init__(self, part: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), part()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class PositionsFirst(nn.Module):
    """[positions, batch, width] throughout (Megatron, ChatGLM): queries, keys and values of each head side by side, two axes for rotary."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = HEADS
            self.input_layernorm, self.post_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            n, b, _ = x.shape
            fused = self.query_key_value(self.input_layernorm(x)).view(n, b, self.heads, 3 * HEAD)
            q, k, v = (t.reshape(n, b * self.heads, HEAD).transpose(0, 1) for t in fused.chunk(3, -1))
            scores = torch.baddbmm(torch.zeros(1, n, n), q, k.transpose(1, 2), beta=0.0, alpha=HEAD**-0.5)
            mixed = torch.bmm(scores.masked_fill(mask(n), -1e4).softmax(-1), v)
            x = x + self.dense(mixed.transpose(0, 1).reshape(n, b, -1))
            return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_layernorm(x))))

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList()
        self.layers.extend(PositionsFirst.Block() for _ in range(DEPTH))
        self.final_layernorm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word_embeddings(ids).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final_layernorm(x), self.word_embeddings.weight).transpose(0, 1)


PACKED = "{style: packed_colwise, packed: 3}"
ATTENTION = "attention: input_with_grad_allreduce\n" + QKVO
HEADS_OF: dict[str, Own] = {
    "rotary tables, repeated keys (llama2.c)": attention(
        Llama,
        """
        attention: {style: input_with_grad_allreduce, shares: [n_local_heads, n_local_kv_heads]}
        attention.{wq,wk,wv}: colwise
        attention.wo: rowwise
        """,
    ),
    "rotary in place": attention(InPlace, ATTENTION),
    "rotary of every two (GPT-J)": attention(
        EveryTwo, "attention: {style: input_with_grad_allreduce, shares: num_attention_heads}\n" + QKVO
    ),
    "memories of heads": attention(Memories, ATTENTION + "attention.{mem_k,mem_v,qk_scale}: headwise\n"),
    "distances, skewed": attention(Skewed, ATTENTION + "attention.er: replicated_with_grad_allreduce\n"),
    "distances of Transformer-XL": attention(
        Relative,
        """
        attention: {style: input_with_grad_allreduce, shares: n_head}
        attention.qkv_net: {style: packed_colwise, packed: 3}
        attention.r_net: colwise
        attention.r_{w,r}_bias: headwise
        attention.o_net: rowwise
        """,
    ),
    "talking heads": attention(
        Talking,
        """
        attention: input_with_grad_allreduce
        attention.{q,k,v,after}: colwise
        attention.{before,o}: rowwise
        """,
    ),
    "latent attention": attention(
        Latent,
        """
        attention: {style: input_with_grad_allreduce, shares: n_heads}
        attention.{wq_a,q_norm,wkv_a,kv_norm}: replicated_with_grad_allreduce
        attention.{wq_b,wkv_b}: colwise
        attention.wo: rowwise
        """,
    ),
    "blocks of heads (CodeGen)": attention(
        Blocks,
        """
        attention: {style: input_with_grad_allreduce, shares: mp_num}
        attention.qkv_proj: colwise
        attention.out_proj: rowwise
        """,
    ),
    "fused by groups (InternLM2)": attention(
        ByGroups,
        """
        attention: input_with_grad_allreduce
        attention.wqkv: colwise
        attention.wo: rowwise
        """,
    ),
    "keys first, by slices": attention(
        KeysFirst,
        f"""
        attention: input_with_grad_allreduce
        attention.kqv: {PACKED}
        attention.out: rowwise
        """,
    ),
    "norms over all heads (OLMo 2)": attention(WholeNorms, ATTENTION + "attention.{q,k}_norm: colwise_norm\n"),
    "differential": attention(
        Differential,
        "attention: {style: input_with_grad_allreduce, shares: num_heads}\n"
        + QKVO
        + "attention.lambda_*: replicated_with_grad_allreduce\nattention.subln: replicated_with_grad_allreduce\n",
    ),
    "matrices by addmm (GPT-2)": decoder(
        GPT2,
        """
        attn: {style: input_with_grad_allreduce, shares: [n_head, split_size]}
        attn.c_attn: {style: local_params, shares: nf}
        attn.c_attn.weight: {style: packed_rowwise, packed: 3}
        attn.c_attn.bias: {style: packed_colwise, packed: 3}
        attn.c_proj: all_reduce
        attn.c_proj.weight: colwise
        attn.c_proj.bias: replicated_divided
        c_fc: {style: input_with_grad_allreduce, shares: nf}
        c_fc.weight: rowwise
        c_fc.bias: colwise
        c_proj: all_reduce
        c_proj.weight: colwise
        c_proj.bias: replicated_divided
        """,
    ),
    "an MLP in a function (minGPT)": decoder(
        Lambda,
        f"""
        attn: input_with_grad_allreduce
        attn.kqv: {PACKED}
        attn.out: rowwise
        mlp.c_fc: colwise
        mlp.c_proj: rowwise
        """,
    ),
    "all in one matrix (PaLM)": decoder(
        PaLM,
        """
        "": {style: replicate, shares: [inner, ff], sum_outputs: [attn_out, ff_out]}
        fused: {style: packed_colwise, packed: [32, 8, 8, 64, 64], heads: [4, 1, 1, 64, 64]}
        "{attn_out,ff_out}": rowwise
        """,
    ),
    "one matrix after both (ViT-22B)": decoder(
        Wide,
        """
        "": {style: replicate, shares: [mlp_dim, inner_dim, num_heads]}
        linear1: {style: packed_colwise, packed: [32, 32, 32, 128]}
        linear2: {style: packed_rowwise, packed: [32, 128]}
        """,
        lacks=("SP534", "heads.py", "write them by hand, with these numbers in `shares`"),
    ),
    "capped, tied by its matrix (Gemma 2)": own(
        Capped,
        """
        blocks.*.attention: input_with_grad_allreduce
        blocks.*.attention.{q,k,v}: colwise
        blocks.*.attention.o: rowwise
        blocks.*.mlp: input_with_grad_allreduce
        blocks.*.mlp.up: colwise
        blocks.*.mlp.down: rowwise
        """,
    ),
    "heads of further tokens": own(
        Medusa,
        """
        embed: embedding_rowwise
        blocks.*.attention: {style: input_with_grad_allreduce, shares: num_attention_heads}
        blocks.*.attention.{q,k,v}: colwise
        blocks.*.attention.o: rowwise
        blocks.*.mlp.1: colwise
        blocks.*.mlp.4: rowwise
        heads.*: colwise_gather_output
        head: colwise_gather_output
        """,
    ),
    "positions first (ChatGLM)": own(
        PositionsFirst,
        """
        layers.*: {style: replicate, shares: heads}
        layers.*.{query_key_value,dense_h_to_4h}: colwise
        layers.*.{dense,dense_4h_to_h}: rowwise
        """,
    ),
}
