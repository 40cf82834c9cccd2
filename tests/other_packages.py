"""Small models, written as other packages write theirs: the same names of modules, the same order of calls."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from own_structures import DEPTH, HEAD, HEADS, LENGTH, VOCABULARY, WIDTH, ids, pictures
from torch import Tensor, nn


class Encoder(nn.Module):
    """torch's nn.TransformerEncoder."""

    def __init__(self, *, norm_first: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=batch_first, norm_first=norm_first)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


class EncoderDecoder(nn.Module):
    """torch's nn.Transformer: both sequences are looked up before either is read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.transformer = nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, 64, 0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.transformer(self.embed(ids), self.embed(ids.flip(1)), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


class TimeFirst(nn.Module):
    """fairseq: [length, batch, features], heads in the dim of the batch, and weights that nobody reads."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_dim, self.num_heads, self.head_dim, self.scaling = WIDTH, HEADS, HEAD, HEAD**-0.5
            self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            tgt_len, bsz, embed_dim = query.size()
            src_len = key.size(0)
            assert embed_dim == query.shape[-1]
            q, k, v = self.q_proj(query) * self.scaling, self.k_proj(key), self.v_proj(value)
            q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
            k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
            v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
            weights = torch.bmm(q, k.transpose(1, 2))
            if attn_mask is not None:
                weights = weights + attn_mask.unsqueeze(0)
            weights = F.softmax(weights, dim=-1)
            attn = torch.bmm(weights, v)
            attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
            shown = weights.view(bsz, self.num_heads, tgt_len, src_len).transpose(1, 0)
            return self.out_proj(attn), shown.mean(dim=0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.self_attn_layer_norm = TimeFirst.Attention(), nn.LayerNorm(WIDTH)
            self.fc1, self.fc2, self.final_layer_norm = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            residual = x
            x, _ = self.self_attn(query=x, key=x, value=x, attn_mask=mask)
            x = self.self_attn_layer_norm(residual + x)
            return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.output_projection = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(TimeFirst.Layer() for _ in range(DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids).transpose(0, 1)
        mask = torch.triu(torch.full((len(x), len(x)), float("-inf")), 1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.output_projection(x.transpose(0, 1))


class Configured(nn.Module):
    """litgpt: every number is read off one configuration, a dataclass."""

    @dataclass
    class Config:
        name: str = "tiny"
        n_layer: int = DEPTH
        n_head: int = HEADS
        n_query_groups: int = HEADS // 2
        head_size: int = HEAD
        n_embd: int = WIDTH
        intermediate_size: int = 64

    class Attention(nn.Module):
        def __init__(self, config: Configured.Config) -> None:
            super().__init__()
            heads = config.n_head + 2 * config.n_query_groups
            self.qkv = nn.Linear(config.n_embd, heads * config.head_size, bias=False)
            self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd, bias=False)
            self.config = config

        def forward(self, x: Tensor) -> Tensor:
            head_size, n_head, groups = self.config.head_size, self.config.n_head, self.config.n_query_groups
            b, t, _ = x.size()
            q, k, v = self.qkv(x).split((n_head * head_size, groups * head_size, groups * head_size), dim=-1)
            q = q.view(b, t, n_head, head_size).transpose(1, 2)
            k, v = (x.view(b, t, groups, head_size).transpose(1, 2) for x in (k, v))
            k, v = (x.repeat_interleave(n_head // groups, dim=1) for x in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            return self.proj(y.reshape(b, t, head_size * n_head))

    class MLP(nn.Module):
        def __init__(self, config: Configured.Config) -> None:
            super().__init__()
            self.fc_1, self.fc_2 = (nn.Linear(config.n_embd, config.intermediate_size, bias=False) for _ in range(2))
            self.proj, self.config = nn.Linear(config.intermediate_size, config.n_embd, bias=False), config

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))

    class Block(nn.Module):
        def __init__(self, config: Configured.Config) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
            self.attn, self.mlp, self.config = Configured.Attention(config), Configured.MLP(config), config

        def forward(self, x: Tensor) -> Tensor:
            x = self.attn(self.norm_1(x)) + x
            return self.mlp(self.norm_2(x)) + x

    def __init__(self) -> None:
        super().__init__()
        config = self.config = Configured.Config()
        self.lm_head = nn.Linear(config.n_embd, VOCABULARY, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, config.n_embd),
                "h": nn.ModuleList(Configured.Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer.wte(ids)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class Clip(nn.Module):
    """open_clip: two towers of nn.MultiheadAttention."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.ls_1, self.ln_2, self.ls_2 = nn.Identity(), nn.LayerNorm(WIDTH), nn.Identity()
            parts = (("c_fc", nn.Linear(WIDTH, 64)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(64, WIDTH)))
            self.mlp = nn.Sequential(OrderedDict(parts))

        def forward(self, q_x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            x = self.ln_1(q_x)
            x = q_x + self.ls_1(self.attn(x, x, x, need_weights=False, attn_mask=attn_mask)[0])
            return x + self.ls_2(self.mlp(self.ln_2(x)))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.resblocks = nn.ModuleList(Clip.Block() for _ in range(DEPTH))

        def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            for block in self.resblocks:
                x = block(x, attn_mask=attn_mask)
            return x

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.class_embedding = nn.Conv2d(3, WIDTH, 4, 4, bias=False), nn.Parameter(torch.randn(WIDTH))
            self.positional_embedding = nn.Parameter(torch.randn(17, WIDTH))
            self.ln_pre, self.transformer, self.ln_post = nn.LayerNorm(WIDTH), Clip.Transformer(), nn.LayerNorm(WIDTH)
            self.proj = nn.Parameter(torch.randn(WIDTH, 16) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv1(x).flatten(2).permute(0, 2, 1)
            x = torch.cat([self.class_embedding.view(1, 1, -1).expand(len(x), -1, -1), x], 1)
            x = self.ln_post(self.transformer(self.ln_pre(x + self.positional_embedding)))
            return x[:, 0] @ self.proj

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.transformer = Clip.Vision(), Clip.Transformer()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.ln_final, self.text_projection = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH, 16) * 0.1)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.0)
        self.register_buffer("attn_mask", torch.full((LENGTH, LENGTH), float("-inf")).triu_(1), persistent=False)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = F.normalize(self.visual(image), dim=-1)
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, attn_mask=self.attn_mask))
        x = x[torch.arange(len(x)), text.argmax(dim=-1)] @ self.text_projection
        return features, F.normalize(x, dim=-1), self.logit_scale.exp()


def image_and_text(seed: int) -> dict[str, Tensor]:
    return {"image": next(iter(pictures(seed).values())), "text": ids(seed)["ids"]}


class Latents(nn.Module):
    """Perceiver as perceiver-pytorch has it, and the distances of conformer's attention: one wrapper around every part, pairs of
    them in a list of lists, heads put into the dim of the batch, a table of distances that all heads read."""

    class Wrapped(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(WIDTH), part

        def forward(self, x: Tensor, **given: Tensor) -> Tensor:
            return self.fn(self.norm(x), **given)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.scale = HEADS, HEAD**-0.5
            self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
            self.to_out, self.distances = nn.Linear(WIDTH, WIDTH), nn.Embedding(2 * LENGTH + 1, HEAD)

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            given = x if context is None else context
            batch, h = len(x), self.heads
            q, k, v = self.to_q(x), *self.to_kv(given).chunk(2, dim=-1)
            q, k, v = (t.reshape(batch, t.shape[1], h, -1).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
            apart = torch.arange(x.shape[1])[:, None] - torch.arange(given.shape[1]) + LENGTH
            near = torch.einsum("b i d, i j d -> b i j", q, self.distances(apart))
            weights = ((torch.einsum("b i d, b j d -> b i j", q, k) + near) * self.scale).softmax(-1)
            out = torch.einsum("b i j, b j d -> b i d", weights, v).unflatten(0, (batch, h))
            return self.to_out(out.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x, gates = self.up(x).chunk(2, dim=-1)
            return self.down(x * F.gelu(gates))

    def __init__(self) -> None:
        super().__init__()
        wrapped, attention, feed_forward = Latents.Wrapped, Latents.Attention, Latents.FeedForward
        self.embed, self.latents = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH // 2, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "cross": wrapped(attention()),
                    "own": nn.ModuleList(
                        nn.ModuleList([wrapped(attention()), wrapped(feed_forward())]) for _ in range(2)
                    ),
                }
            )
            for _ in range(DEPTH)
        )

    def forward(self, ids: Tensor) -> Tensor:
        context, x = self.embed(ids), self.latents.expand(len(ids), -1, -1)
        for layer in self.layers:
            x = layer["cross"](x, context=context) + x
            for attention, feed_forward in layer["own"]:
                x = attention(x) + x
                x = feed_forward(x) + x
        return x
