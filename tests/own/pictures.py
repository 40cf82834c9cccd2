"""Models of pictures, sounds and series, and those of two sequences."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import own_structures as structures
from tests.own_structures import DEPTH, HEAD, HEADS, LENGTH, VOCABULARY, WIDTH, ids, pictures
from tests.test_init_own import Diffusion, TwoStreams, images

from .hand import Own, own
from .heads import ByItself, Four, angles, linear
from .mixers import GLU, Rotated

CHANNELS = 16


def drawn(**shapes: tuple[int, ...]) -> partial[dict[str, Tensor]]:
    """Values of these shapes, from a seed."""
    return partial(_drawn, shapes)


def _drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def two_sequences(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for name in ("ids", "decoder_ids")}


class NormedViT(nn.Module):
    """timm's block with norms of queries and keys and layer scale, pooled over the positions; register tokens (DINOv2)."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.head_dim, self.scale = HEADS, HEAD, HEAD**-0.5
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)

        def forward(self, x: Tensor) -> Tensor:
            B, N, _ = x.shape
            qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
            x = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1) @ v
            return self.proj(x.transpose(1, 2).reshape(B, N, self.num_heads * self.head_dim))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(0.1 * torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x.mul(self.gamma)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attn, self.mlp = NormedViT.Attention(), structures.MLP()
            self.ls1, self.ls2 = NormedViT.Scale(), NormedViT.Scale()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.ls1(self.attn(self.norm1(x)))
            return x + self.ls2(self.mlp(self.norm2(x)))

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.registers, self.pos_embed = (nn.Parameter(torch.randn(1, n, WIDTH)) for n in (2, 16))
        self.blocks = nn.Sequential(*(NormedViT.Block() for _ in range(DEPTH)))
        self.fc_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2) + self.pos_embed
        x = self.blocks(torch.cat([self.registers.expand(x.shape[0], -1, -1), x], dim=1))
        return self.head(self.fc_norm(x[:, 2:].mean(dim=1)))


class ConvNeXt(nn.Module):
    """A convolution of each channel, and an MLP whose matrices see channels last."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dwconv, self.norm = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), nn.LayerNorm(WIDTH)
            self.pwconv1, self.act, self.pwconv2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            self.gamma = nn.Parameter(0.1 * torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            given = x
            x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
            return given + (self.gamma * self.pwconv2(self.act(self.pwconv1(x)))).permute(0, 3, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 10)
        self.stages = nn.ModuleList(nn.Sequential(*(ConvNeXt.Block() for _ in range(DEPTH))) for _ in range(1))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean([-2, -1])))


class UNet(nn.Module):
    """A U-Net of diffusion: convolutions with a time, and attention at the bottom (convolutions 1 x 1, channels first)."""

    class Convolutions(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.norm, self.proj = nn.GroupNorm(4, outputs), nn.Conv2d(inputs, outputs, 3, padding=1)
            self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * outputs))

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            scale, shift = self.mlp(time)[:, :, None, None].chunk(2, dim=1)
            return F.silu(self.norm(self.proj(x)) * (scale + 1) + shift)

    class Transformer(nn.Module):
        """Stable Diffusion's: pixels as tokens, which attend to each other and to a text."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
            self.attn1, self.attn2 = structures.Crossing.Attention(), structures.Crossing.Attention()
            self.ff_in, self.ff_out = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            h = self.norm1(x)
            x = x + self.attn1(h, h)
            x = x + self.attn2(self.norm2(x), text)
            x, gate = self.ff_in(self.norm3(x)).chunk(2, dim=-1), x
            return gate + self.ff_out(x[0] * F.gelu(x[1]))

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down, self.up = UNet.Convolutions(CHANNELS, WIDTH), UNet.Convolutions(2 * WIDTH, CHANNELS)
        self.smaller, self.larger = nn.Conv2d(WIDTH, WIDTH, 4, 4), nn.ConvTranspose2d(WIDTH, WIDTH, 4, 4)
        self.middle = nn.ModuleList(UNet.Transformer() for _ in range(4))
        self.last = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        t = self.time(time[:, :1])
        kept = self.down(self.first(x), t)
        x = self.smaller(kept)
        b, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1).reshape(b, h * w, c)
        for block in self.middle:
            x = block(x, text)
        x = self.larger(x.transpose(1, 2).reshape(b, c, h, w))
        return self.last(self.up(torch.cat([x, kept], dim=1), t))


class Pixart(nn.Module):
    """A diffusion transformer whose blocks have a table of shifts and scales, and read a text."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
            self.attn, self.cross, self.mlp = Rotated(), structures.Crossing.Attention(), structures.MLP()
            self.scale_shift_table = nn.Parameter(torch.randn(6, WIDTH) / WIDTH**0.5)

        def forward(self, x: Tensor, text: Tensor, t: Tensor) -> Tensor:
            a, b, c, d, e, f = (self.scale_shift_table[None] + t.reshape(x.shape[0], 6, -1)).chunk(6, dim=1)
            x = x + c * self.attn(self.norm1(x) * (1 + b) + a)
            x = x + self.cross(x, text)
            return x + f * self.mlp(self.norm2(x) * (1 + e) + d)

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(8, WIDTH)
        self.t_block = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.blocks = nn.ModuleList(Pixart.Block() for _ in range(DEPTH))
        self.final = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x, t = self.x_embedder(x), self.t_block(time[:, :1])
        for block in self.blocks:
            x = block(x, text, t)
        return self.final(x)


class Conformer(nn.Module):
    """Half an MLP, attention, a gated convolution with a norm of its batch, half an MLP."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.bn = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
            self.pointwise_conv1, self.pointwise_conv2 = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
            self.depthwise_conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = F.glu(self.pointwise_conv1(self.norm(x).transpose(1, 2)), dim=1)
            return self.pointwise_conv2(F.silu(self.bn(self.depthwise_conv(x)))).transpose(1, 2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ff1, self.ff2 = Conformer.half(), Conformer.half()
            self.norm, self.attention, self.conv = nn.LayerNorm(WIDTH), Four(), Conformer.Convolution()
            self.last = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.5 * self.ff1(x)
            q, k, v = self.attention.heads(self.norm(x))
            x = x + self.attention.joined(F.scaled_dot_product_attention(q, k, v))
            x = x + self.conv(x)
            return self.last(x + 0.5 * self.ff2(x))

    @staticmethod
    def half() -> nn.Sequential:
        parts = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)]
        return nn.Sequential(*parts)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(8, WIDTH, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Conformer.Block() for _ in range(DEPTH))
        self.ctc = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.ctc(x).log_softmax(-1)


class Whisper(nn.Module):
    """An encoder of sounds and a decoder that reads it; the decoder's embedding gives the logits."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_head = HEADS
            self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), linear(), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
            q, k, v = self.query(x), self.key(x if xa is None else xa), self.value(x if xa is None else xa)
            q, k, v = (t.view(*t.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) for t in (q, k, v))
            qk = (q * HEAD**-0.25) @ (k * HEAD**-0.25).transpose(-1, -2)
            if mask is not None:
                qk = qk + mask[: x.shape[1], : x.shape[1]]
            return self.out((qk.float().softmax(-1) @ v).permute(0, 2, 1, 3).flatten(start_dim=2))

    class Block(nn.Module):
        def __init__(self, cross: bool = False) -> None:
            super().__init__()
            self.attn, self.attn_ln = Whisper.Attention(), nn.LayerNorm(WIDTH)
            self.cross_attn = Whisper.Attention() if cross else None
            self.cross_attn_ln = nn.LayerNorm(WIDTH) if cross else None
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            self.mlp_ln = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
            x = x + self.attn(self.attn_ln(x), mask=mask)
            if self.cross_attn is not None and self.cross_attn_ln is not None:
                x = x + self.cross_attn(self.cross_attn_ln(x), xa)
            return x + self.mlp(self.mlp_ln(x))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(8, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
            self.register_buffer("positions", torch.cat([angles(WIDTH).sin(), angles(WIDTH).cos()], 1))
            self.blocks = nn.ModuleList(Whisper.Block() for _ in range(DEPTH))
            self.ln_post = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).permute(0, 2, 1) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.ln_post(x)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.positional_embedding = nn.Parameter(torch.randn(LENGTH, WIDTH))
            self.blocks, self.ln = nn.ModuleList(Whisper.Block(True) for _ in range(DEPTH)), nn.LayerNorm(WIDTH)
            self.register_buffer("mask", torch.full((LENGTH, LENGTH), -torch.inf).triu_(1), persistent=False)

        def forward(self, x: Tensor, xa: Tensor) -> Tensor:
            x = self.token_embedding(x) + self.positional_embedding[: x.shape[-1]]
            for block in self.blocks:
                x = block(x, xa, mask=self.mask)
            return (self.ln(x) @ torch.transpose(self.token_embedding.weight, 0, 1)).float()

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Whisper.Encoder(), Whisper.Decoder()

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, self.encoder(mel))


def sounds(seed: int) -> dict[str, Tensor]:
    return {"mel": _drawn({"mel": (2, 8, 2 * LENGTH)}, seed)["mel"], "tokens": ids(seed)["ids"]}


class T5(nn.Module):
    """T5: the first block of each stack has a table [buckets, heads], whose look-up all blocks add; one embedding for both stacks."""

    class Attention(nn.Module):
        def __init__(self, table: bool = False) -> None:
            super().__init__()
            self.n_heads, self.key_value_proj_dim = HEADS, HEAD
            self.q, self.k, self.v, self.o = (linear() for _ in range(4))
            self.has_relative_attention_bias = table
            if table:
                self.relative_attention_bias = nn.Embedding(2 * LENGTH, HEADS)

        def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            def shape(states: Tensor) -> Tensor:
                return states.view(len(states), -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)

            q, k, v = shape(self.q(x)), shape(self.k(memory)), shape(self.v(memory))
            scores = torch.matmul(q, k.transpose(3, 2))
            if bias is None:
                if self.has_relative_attention_bias:
                    at = torch.arange(x.shape[1])
                    bias = self.relative_attention_bias(at - at[:, None] + LENGTH).permute(2, 0, 1).unsqueeze(0)
                else:
                    bias = torch.zeros_like(scores)
            mixed = torch.matmul(F.softmax((scores + bias).float(), dim=-1), v).transpose(1, 2).contiguous()
            return self.o(mixed.view(len(x), -1, self.n_heads * self.key_value_proj_dim)), bias

    class Block(nn.Module):
        def __init__(self, table: bool, crosses: bool) -> None:
            super().__init__()
            self.norms, self.attention = (
                nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 + crosses)),
                T5.Attention(table),
            )
            self.cross, self.mlp = T5.Attention() if crosses else None, GLU()

        def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            h = self.norms[0](x)
            mixed, bias = self.attention(h, h, bias)
            x = x + mixed
            if self.cross is not None and memory is not None:
                x = x + self.cross(self.norms[1](x), memory, None)[0]
            return x + self.mlp(self.norms[-1](x)), bias

    class Side(nn.Module):
        def __init__(self, crosses: bool) -> None:
            super().__init__()
            self.block = nn.ModuleList(T5.Block(i == 0, crosses) for i in range(DEPTH))

        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            bias = None
            for block in self.block:
                x, bias = block(x, memory, bias)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.lm_head = nn.Embedding(VOCABULARY, WIDTH), linear(WIDTH, VOCABULARY)
        self.encoder, self.decoder = T5.Side(False), T5.Side(True)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        memory = self.encoder(self.shared(ids))
        return self.lm_head(self.decoder(self.shared(decoder_ids), memory))


class Detr(nn.Module):
    """Learned queries read a picture; positions are added to queries and keys alone; two heads give boxes and classes."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (linear() for _ in range(4))
            self.linear1, self.linear2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, memory: Tensor, pos: Tensor, query_pos: Tensor) -> Tensor:
            given = (self.q(x + query_pos), self.k(memory + pos), self.v(memory))
            q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in given)
            x = self.norm1(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
            return self.norm2(x + self.linear2(F.relu(self.linear1(x))))

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.pos = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 16, WIDTH))
        self.query_embed, self.layers = nn.Embedding(6, WIDTH), nn.ModuleList(Detr.Layer() for _ in range(DEPTH))
        self.class_embed = nn.Linear(WIDTH, 11)
        self.bbox_embed = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        memory = self.backbone(x).flatten(2).transpose(1, 2)
        query_pos = self.query_embed.weight.unsqueeze(0).repeat(len(x), 1, 1)
        h = torch.zeros_like(query_pos)
        for layer in self.layers:
            h = layer(h, memory, self.pos, query_pos)
        return {"logits": self.class_embed(h), "boxes": self.bbox_embed[1](F.relu(self.bbox_embed[0](h))).sigmoid()}


class Clip(nn.Module):
    """Two towers, and the likeness of their results."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding, self.positions = (
                nn.Embedding(VOCABULARY, WIDTH),
                nn.Parameter(torch.randn(LENGTH, WIDTH)),
            )
            self.resblocks = nn.ModuleList(ByItself(Rotated) for _ in range(DEPTH))
            self.projection = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.token_embedding(ids) + self.positions
            for block in self.resblocks:
                x = block(x)
            return x[torch.arange(len(x)), ids.argmax(-1)] @ self.projection

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = NormedViT(), Clip.Text()
        self.visual.head = nn.Linear(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        pictures, texts = (F.normalize(one, dim=-1) for one in (self.visual(x), self.text(ids)))
        return self.logit_scale.exp() * pictures @ texts.t()


def pairs(seed: int) -> dict[str, Tensor]:
    return {**pictures(seed), **ids(seed)}


class Flamingo(nn.Module):
    """Blocks of a decoder between gated ones that read a picture, the same modules in two lists."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn, self.ff = nn.LayerNorm(WIDTH), structures.Crossing.Attention(), GLU()
            self.attn_gate, self.ff_gate = nn.Parameter(torch.tensor([0.3])), nn.Parameter(torch.tensor([0.2]))

        def forward(self, x: Tensor, media: Tensor) -> Tensor:
            x = self.attn(self.norm(x), media) * self.attn_gate.tanh() + x
            return self.ff(x) * self.ff_gate.tanh() + x

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.embed = nn.Conv2d(3, WIDTH, 4, 4), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([ByItself(Rotated), Flamingo.Gated() if i % 2 == 0 else None]) for i in range(2 * DEPTH)
        )
        self.head = linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        media, y = self.patches(x).flatten(2).transpose(1, 2), self.embed(ids)
        for block, crossing in self.layers:
            if crossing is not None:
                y = crossing(y, media)
            y = block(y)
        return self.head(y)


class Prefix(nn.Module):
    """A picture's features, through a projector of two matrices, in front of the text (LLaVA)."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(CHANNELS, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.model = structures.Tokens(partial(ByItself, Rotated))

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        x = torch.cat([self.projector(features), self.model.embed(ids)], 1)
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x[:, features.shape[1] :]))


def features_and_ids(seed: int) -> dict[str, Tensor]:
    return {**_drawn({"features": (2, 4, CHANNELS)}, seed), **ids(seed)}


class Patches(nn.Module):
    """PatchTST: each channel of a series by itself, cut into patches by `unfold`, means taken off and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(ByItself(Rotated) for _ in range(DEPTH))
        self.positions, self.head = nn.Parameter(torch.randn(8, WIDTH)), nn.Linear(8 * WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True).detach()
        patches = (x - mean).transpose(1, 2).unfold(-1, 4, 4)
        h = self.value(patches.flatten(0, 1)) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h.flatten(1)).unflatten(0, patches.shape[:2]).transpose(1, 2) + mean


TEXT = """
{at}.attention: input_with_grad_allreduce
{at}.attention.{{q,k,v}}: colwise
{at}.attention.o: rowwise
{at}.mlp.1: colwise
{at}.mlp.4: rowwise
"""
CROSSING = """
{at}: {{style: input_with_grad_allreduce, shares: heads, arguments: {{context: input_with_grad_allreduce}}}}
{at}.to_q: colwise
{at}.to_kv: packed_colwise
{at}.to_out: rowwise
"""
VIT = """
{at}blocks.*.attn: {{style: input_with_grad_allreduce, shares: num_heads}}
{at}blocks.*.attn.qkv: {{style: packed_colwise, packed: 3}}
{at}blocks.*.attn.{{q,k}}_norm: replicated_with_grad_allreduce
{at}blocks.*.attn.proj: rowwise
{at}blocks.*.mlp: input_with_grad_allreduce
{at}blocks.*.mlp.up: colwise
{at}blocks.*.mlp.down: rowwise
"""
PICTURES: dict[str, Own] = {
    "ViT with registers, norms, layer scale": own(NormedViT, VIT.format(at=""), pictures),
    "ViT in lists (einops)": own(
        structures.Vision,
        """
        layers.*.0.to_qkv: {style: packed_colwise, packed: 3}
        layers.*.0: {style: replicate, shares: heads}
        layers.*.0.to_out.0: rowwise
        layers.*.1.net.1: colwise
        layers.*.1.net.4: rowwise
        """,
        pictures,
    ),
    "windows (Swin)": own(
        structures.Windows,
        """
        blocks.*.attn: {style: input_with_grad_allreduce, shares: num_heads}
        blocks.*.attn.qkv: {style: packed_colwise, packed: 3}
        blocks.*.attn.relative_position_bias_table: rowwise
        blocks.*.attn.proj: rowwise
        blocks.*.mlp: input_with_grad_allreduce
        blocks.*.mlp.up: colwise
        blocks.*.mlp.down: rowwise
        """,
        pictures,
    ),
    "ConvNeXt": own(
        ConvNeXt,
        """
        stages.*.*.pwconv1: colwise
        stages.*.*.pwconv2: rowwise
        """,
        pictures,
    ),
    "U-Net with a text": own(
        UNet,
        CROSSING.format(at="middle.*.attn2")
        + """
middle.*.attn1:
  style: input_with_grad_allreduce
  shares: heads
  arguments: {context: input_with_grad_allreduce}
middle.*.attn1.to_q: colwise
middle.*.attn1.to_kv: packed_colwise
middle.*.attn1.to_out: rowwise
middle.*.ff_in: packed_colwise
middle.*.ff_out: rowwise
""",
        drawn(x=(2, 3, 16, 16), time=(2, 1), text=(2, 5, WIDTH)),
    ),
    "DiT (adaLN)": own(
        Diffusion,
        """
        blocks.*.attn: input_with_grad_allreduce
        blocks.*.attn.{q,k,v}: colwise
        blocks.*.attn.o: rowwise
        blocks.*.up: colwise
        blocks.*.down: rowwise
        """,
        images,
    ),
    "DiT with a text (PixArt)": own(
        Pixart,
        CROSSING.format(at="blocks.*.cross")
        + """
blocks.*.attn: input_with_grad_allreduce
blocks.*.attn.{q,k,v}: colwise
blocks.*.attn.o: rowwise
blocks.*.mlp: input_with_grad_allreduce
blocks.*.mlp.up: colwise
blocks.*.mlp.down: rowwise
""",
        drawn(x=(2, LENGTH, 8), time=(2, 1), text=(2, 5, WIDTH)),
    ),
    "two streams (SD3)": own(
        TwoStreams,
        """
        one: embedding_rowwise
        other: embedding_rowwise
        blocks.*.{q,k,v,add_q,add_k,add_v}: colwise
        blocks.*.{o,add_o}: rowwise
        """,
    ),
    "conformer": own(
        Conformer,
        """
        layers.*.ff{1,2}.1: colwise
        layers.*.ff{1,2}.3: rowwise
        layers.*.attention.{q,k,v}: colwise
        layers.*.attention.o: rowwise
        """,
        drawn(x=(2, 8, 2 * LENGTH)),
    ),
    "whisper": own(
        Whisper,
        """
        "{encoder,decoder}.blocks.*.{attn,cross_attn}": {style: replicate, shares: n_head}
        "{encoder,decoder}.blocks.*.{attn,cross_attn}.{query,key,value}": colwise
        "{encoder,decoder}.blocks.*.{attn,cross_attn}.out": rowwise
        "{encoder,decoder}.blocks.*.mlp.0": colwise
        "{encoder,decoder}.blocks.*.mlp.2": rowwise
        """,
        sounds,
    ),
    "T5": own(
        T5,
        """
        shared: embedding_rowwise
        "{encoder,decoder}.block.*.{attention,cross}": {style: replicate, shares: n_heads}
        "{encoder,decoder}.block.*.{attention,cross}.{q,k,v}": colwise
        "{encoder,decoder}.block.*.{attention,cross}.o": rowwise
        "{encoder,decoder}.block.0.attention.relative_attention_bias": local_params
        "{encoder,decoder}.block.0.attention.relative_attention_bias.weight": colwise
        "{encoder,decoder}.block.*.mlp.w{1,3}": colwise
        "{encoder,decoder}.block.*.mlp.w2": rowwise
        lm_head: colwise_gather_output
        """,
        two_sequences,
    ),
    "encoder and decoder": own(
        structures.Crossing,
        CROSSING.format(at="decoder.*.own")
        + CROSSING.format(at="decoder.*.cross")
        + """
embed: embedding_rowwise
encoder.*.attention: {style: input_with_grad_allreduce, shares: num_heads}
encoder.*.attention.q: colwise
encoder.*.attention.kv: packed_colwise
encoder.*.attention.proj: rowwise
"{encoder,decoder}.*.mlp": input_with_grad_allreduce
"{encoder,decoder}.*.mlp.up": colwise
"{encoder,decoder}.*.mlp.down": rowwise
head: colwise_gather_output
""",
    ),
    "queries of objects (DETR)": own(
        Detr,
        """
        layers.*.{q,k,v,linear1}: colwise
        layers.*.{o,linear2}: rowwise
        """,
        pictures,
    ),
    "two towers (CLIP)": own(Clip, VIT.format(at="visual.") + TEXT.format(at="text.resblocks.*"), pairs),
    "gated cross-attention (Flamingo)": own(
        Flamingo,
        TEXT.format(at="layers.*.0")
        + CROSSING.format(at="layers.*.1.attn")
        + "layers.*.1.ff.w{1,3}: colwise\nlayers.*.1.ff.w2: rowwise\n"
        + "embed: embedding_rowwise\nhead: colwise_gather_output\n",
        pairs,
    ),
    "a picture in front of a text (LLaVA)": own(
        Prefix,
        TEXT.format(at="model.blocks.*")
        + "model.embed: embedding_rowwise\nmodel.head: colwise_gather_output\n"
        + "projector.0: colwise\nprojector.2: rowwise\n",
        features_and_ids,
        ("SP532", "projector.2: colwise_gather_output"),
    ),
    "patches of a series (PatchTST)": own(Patches, TEXT.format(at="blocks.*"), drawn(x=(2, 32, 3))),
}
