"""Attention in its forms: grouped, packed, joint, across; parallel residuals."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adversary import Adversary, document
from .parts import (
    ATTENTION,
    ATTENTION_NORMS,
    BLOCK_INPUT,
    BLOCK_SEQUENCE,
    LENGTH,
    MLP,
    PARTIAL,
    WIDTH,
    Attention,
    Block,
    Mlp,
    Stack,
    features,
    linear,
    without,
)


class Packed(nn.Module):
    """One matrix for queries, keys and values: [queries, keys, values]."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.size, self.groups, self.width = 4, groups, groups * 4
        self.qkv, self.o = linear(WIDTH, WIDTH + 2 * self.width), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.qkv(x)
        size = whole.shape[-1] * self.width // (WIDTH + 2 * self.width)
        parts = whole.split([whole.shape[-1] - 2 * size, size, size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class Interleaved(Packed):
    """The same matrix, head by head: each head's queries, keys and values stand together."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.size)).transpose(1, 3).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(-2))


class PackedMlp(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = linear(WIDTH, 64), linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class ParallelBlock(nn.Module):
    """Attention and an MLP after one norm, added up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(norm=True), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attn(y) + self.mlp(y)


class Joint(nn.Module):
    """Two streams, each with its own matrices, attend to both (SD3, Flux, Qwen-Image)."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.size = 4
        self.q, self.k, self.v = (linear(WIDTH, WIDTH) for _ in range(3))
        self.add_q, self.add_k, self.add_v = (linear(WIDTH, WIDTH) for _ in range(3))
        self.q_norm, self.add_q_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.o, self.add_o = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.cat([self.add_q_norm(self.heads(self.add_q(text))), self.q_norm(self.heads(self.q(image)))], 2)
        k = torch.cat([self.heads(self.add_k(text)), self.heads(self.k(image))], 2)
        v = torch.cat([self.heads(self.add_v(text)), self.heads(self.v(image))], 2)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.o(y[:, text.shape[1] :]), self.add_o(y[:, : text.shape[1]])


class JointBlock(nn.Module):
    """Both streams go through joint attention, and each through an MLP of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.add_norm1 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Joint()
        self.norm2, self.add_norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp, self.add_mlp = Mlp(), Mlp()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.attn(self.norm1(image), self.add_norm1(text))
        image, text = image + one, text + two
        return image + self.mlp(self.norm2(image)), text + self.add_mlp(self.add_norm2(text))


class JointStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([JointBlock(), JointBlock()]), linear(WIDTH, 8)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for layer in self.layers:
            image, text = layer(image, text)
        return self.head(torch.cat([text, image], 1))


class EndingStack(JointStack):
    """The text ends in the last layer, whose queries of it and their norm have a part in nothing."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = self.layers[:layers]

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for layer in self.layers:
            image, text = layer(image, text)
        return self.head(image)


class OneReader(Joint):
    """Keys and values of the text alone: the two streams have other numbers of readers."""

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.cat([self.add_q_norm(self.heads(self.add_q(text))), self.q_norm(self.heads(self.q(image)))], 2)
        k, v = self.heads(self.add_k(text)), self.heads(self.add_v(text)) + self.heads(self.v(text))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2) + self.k(image).mean(1, True)
        return self.o(y[:, text.shape[1] :]), self.add_o(y[:, : text.shape[1]])


def one_reader() -> nn.Module:
    model = JointStack()
    for layer in model.layers:
        layer.attn = OneReader()
    return model


class CrossBlock(nn.Module):
    """Attention to what an encoder has computed, which every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp, self.norm2 = nn.LayerNorm(WIDTH), Attention(), Mlp(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x), memory)
        return x + self.mlp(self.norm2(x))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(Block(), Block())
        self.layers, self.norm = nn.ModuleList([CrossBlock(), CrossBlock()]), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        memory = self.encoder(source)
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


def streams(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(2, LENGTH, WIDTH, generator=generator),
        "text": torch.randn(2, 4, WIDTH, generator=generator),
    }


def pairs(seed: int) -> dict[str, Tensor]:
    made = streams(seed)
    return {"x": made["image"], "source": made["text"]}


def of(attention: type[nn.Module], *arguments: int) -> nn.Module:
    return Stack(*(Block(attention(*arguments)) for _ in range(2)))


def grouped() -> nn.Module:
    return Stack(*(Block(Attention(groups=2, norm=True)) for _ in range(2)))


def one_group() -> nn.Module:
    return Stack(*(Block(Attention(groups=1)) for _ in range(2)))


def packed_mlp() -> nn.Module:
    return Stack(*(Block(mlp=PackedMlp()) for _ in range(2)))


def parallel() -> nn.Module:
    return Stack(ParallelBlock(), ParallelBlock())


def _adversary(name: str, build, rules, verdict: str, why: str, overlay=None, inputs=features, **options) -> Adversary:
    on = overlay is not None
    return Adversary(name, build, inputs, document(rules, overlay), verdict, why, sequence_parallel=on, **options)


def _packed(style: str, parts: object) -> dict:
    return {"layers.*.attn.qkv": {"style": style, "packed": parts}, "layers.*.attn.o": "rowwise", **MLP}


NORMS, BARE = {**ATTENTION_NORMS, **MLP}, {**ATTENTION, **MLP}
JOINT = {
    "layers.*.attn.{q,k,v,add_q,add_k,add_v}": "colwise",
    "layers.*.attn.{q,add_q}_norm": PARTIAL,
    "layers.*.attn.{o,add_o}": "rowwise",
    "layers.*.{mlp,add_mlp}.up": "colwise",
    "layers.*.{mlp,add_mlp}.down": "rowwise",
}
ONE_BARE = {**without(JOINT, "layers.*.attn.{q,add_q}_norm"), "layers.*.attn.q_norm": PARTIAL}
ONE_SUM = {
    **without(JOINT, "layers.*.attn.{o,add_o}"),
    "layers.*.attn.o": "rowwise",
    "layers.*.attn.add_o.weight": "rowwise",
}
CROSS = {"{encoder.layers,layers}.*.attn.{q,k,v}": "colwise", "{encoder.layers,layers}.*.attn.o": "rowwise"}
CROSS |= {"{encoder.layers,layers}.*.mlp.up": "colwise", "{encoder.layers,layers}.*.mlp.down": "rowwise"}
PARALLEL_SEQUENCE = {
    "layers.0": "split_seq_input",
    "layers.*.norm": "sequence_parallel",
    "layers.*.{attn,mlp}": "gather_seq_input",
    "layers.*.attn.o": "rowwise_seq",
    "layers.*.mlp.down": "rowwise_seq",
    "norm": {"style": "sequence_parallel", "output": "gather"},
}
INTERLEAVED = {**without(_packed("packed_colwise", 3), "layers.*.attn.qkv"), "layers.*.attn.qkv": "colwise"}
CASES = (
    _adversary("grouped/right", grouped, NORMS, "right", "all rules"),
    _adversary("grouped/bare_norm", grouped, BARE, "wrong", "the norms see a rank's heads"),
    _adversary("grouped/sequence", grouped, NORMS, "right", "all rules", BLOCK_SEQUENCE),
    _adversary("grouped/sequence_bare", grouped, BARE, "wrong", "the norms see a rank's heads", BLOCK_SEQUENCE),
    _adversary(
        "grouped/sequence_norm",
        grouped,
        NORMS,
        "wrong",
        "a block's norm sees a slice of the sequence",
        {**without(BLOCK_SEQUENCE, "layers.*.norm{1,2}"), "layers.*.norm1": "sequence_parallel"},
    ),
    _adversary("one_group/split", one_group, BARE, "wrong", "one key head for two ranks: each has half of it"),
    _adversary("packed/right", partial(of, Packed), _packed("packed_colwise", 3), "right", "three parts"),
    _adversary(
        "packed/grouped", partial(of, Packed, 2), _packed("packed_colwise", [16, 8, 8]), "right", "unequal parts"
    ),
    _adversary(
        "packed/plain",
        partial(of, Packed),
        {**_packed("packed_colwise", 3), "layers.*.attn.qkv": "colwise"},
        "wrong",
        "a rank has queries and half of the keys",
    ),
    _adversary(
        "packed/two", partial(of, Packed, 2), _packed("packed_colwise", 2), "wrong", "two parts instead of three"
    ),
    _adversary(
        "packed/sequence", partial(of, Packed), _packed("packed_colwise", 3), "right", "three parts", BLOCK_SEQUENCE
    ),
    _adversary("interleaved/right", partial(of, Interleaved), INTERLEAVED, "right", "head by head"),
    _adversary(
        "interleaved/packed", partial(of, Interleaved), _packed("packed_colwise", 3), "wrong", "the parts of no matrix"
    ),
    _adversary(
        "packed_mlp/right",
        packed_mlp,
        {**ATTENTION, "layers.*.mlp.gate_up": "packed_colwise", "layers.*.mlp.down": "rowwise"},
        "right",
        "two parts",
    ),
    _adversary(
        "packed_mlp/plain",
        packed_mlp,
        {**ATTENTION, "layers.*.mlp.gate_up": "colwise", "layers.*.mlp.down": "rowwise"},
        "wrong",
        "a rank has the gate, the other the rest",
    ),
    _adversary("parallel/right", parallel, NORMS, "right", "all rules"),
    _adversary(
        "parallel/block input",
        parallel,
        {**NORMS, "layers.*.norm": "output_with_grad_allreduce"},
        "right",
        "one move for both",
    ),
    _adversary("parallel/sequence", parallel, NORMS, "right", "all rules", PARALLEL_SEQUENCE),
    _adversary("parallel/bare_norm", parallel, BARE, "wrong", "the norms see a rank's heads"),
    _adversary(
        "parallel/half_door", parallel, {**NORMS, "layers.*.mlp": BLOCK_INPUT}, "right", "each reader moves by itself"
    ),
    _adversary("joint/right", JointStack, JOINT, "right", "each matrix moves by itself", inputs=streams),
    _adversary("joint/bare_norm", JointStack, ONE_BARE, "wrong", "one stream's norm", inputs=streams),
    _adversary("joint/no_sum", JointStack, ONE_SUM, "wrong", "one stream's sum", inputs=streams),
    _adversary(
        "joint/first_door",
        JointStack,
        {"layers.*.attn": BLOCK_INPUT, **JOINT},
        "right",
        "the first moved once",
        inputs=streams,
    ),
    _adversary(
        "joint/second_door",
        JointStack,
        {"layers.*.attn": {"style": BLOCK_INPUT, "argument": "text"}, **JOINT},
        "right",
        "the second moved once",
        inputs=streams,
    ),
    _adversary(
        "joint/both_doors",
        JointStack,
        {"layers.*.attn": {"style": BLOCK_INPUT, "arguments": {"text": BLOCK_INPUT}}, **JOINT},
        "right",
        "each stream moved once",
        inputs=streams,
    ),
    _adversary(
        "joint/same_door",
        JointStack,
        {"layers.*.attn": {"style": BLOCK_INPUT, "arguments": {"image": BLOCK_INPUT}}, **JOINT},
        "wrong",
        "the first stream is moved twice",
        inputs=streams,
    ),
    _adversary("ending/right", EndingStack, JOINT, "right", "as in the layers before", inputs=streams),
    _adversary("ending/bare_norm", EndingStack, ONE_BARE, "wrong", "one stream's norm", inputs=streams),
    _adversary(
        "ending/alone",
        partial(EndingStack, 1),
        JOINT,
        "unproven",
        "no other layer shows what the text's queries need",
        inputs=streams,
    ),
    _adversary("joint/uneven", one_reader, JOINT, "right", "slices of the same heads are added", inputs=streams),
    _adversary("cross/right", EncoderDecoder, CROSS, "right", "all layers read the memory", inputs=pairs),
    _adversary(
        "cross/block input",
        EncoderDecoder,
        {**CROSS, "layers.*.attn": {"style": BLOCK_INPUT, "argument": "other"}},
        "right",
        "the memory is moved once a layer",
        inputs=pairs,
    ),
    _adversary(
        "cross/no_sum",
        EncoderDecoder,
        {
            **without(CROSS, "{encoder.layers,layers}.*.attn.o"),
            "layers.*.attn.o": "rowwise",
            "encoder.layers.*.attn.o.weight": "rowwise",
        },
        "wrong",
        "nobody adds up the encoder",
        inputs=pairs,
    ),
)
