"""Layers that mix tokens without a softmax over pairs of them, and mixtures of experts written as loops."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import own_structures as structures
from tests.own_structures import HEAD, HEADS, LENGTH, WIDTH

from .hand import Own, attention, decoder, own
from .heads import ATTENTION, ByItself, Four, linear, mask

INNER, STATE, STEP, EXPERTS = 2 * WIDTH, 4, 2, 4


class Mamba(nn.Module):
    """mamba-minimal: a convolution of each channel, steps from all channels, a scan as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.d_inner, self.d_state, self.dt_rank = INNER, STATE, STEP
        self.in_proj, self.out_proj = linear(WIDTH, 2 * INNER), linear(INNER, WIDTH)
        self.conv1d = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.x_proj, self.dt_proj = linear(INNER, STEP + 2 * STATE), nn.Linear(STEP, INNER)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, STATE + 1).repeat(INNER, 1)))
        self.D = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        x, res = self.in_proj(x).split(split_size=[self.d_inner, self.d_inner], dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :n].transpose(1, 2))
        return self.out_proj(self.ssm(x) * F.silu(res))

    def ssm(self, x: Tensor) -> Tensor:
        a = -torch.exp(self.A_log.float())
        delta, b, c = self.x_proj(x).split(split_size=[self.dt_rank, self.d_state, self.d_state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        keep = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        given = torch.einsum("bld,bln,bld->bldn", delta, b, x)
        state, found = torch.zeros_like(given[:, 0]), []
        for i in range(x.shape[1]):
            state = keep[:, i] * state + given[:, i]
            found.append(torch.einsum("bdn,bn->bd", state, c[:, i]))
        return torch.stack(found, 1) + x * self.D


class Linear(Four):
    """Linear attention with elu + 1, cumulative over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
        norm = 1 / torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2))
        return self.joined(torch.einsum("bhnde,bhnd,bhn->bhne", state, q, norm))


class GatedLinear(Four):
    """Gated linear attention (arXiv 2312.06635): decays of each feature through a narrow matrix, a norm of each head, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gk = nn.Sequential(linear(WIDTH, 4), nn.Linear(4, WIDTH))
        self.g, self.g_norm = linear(), nn.RMSNorm(HEAD, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        decay = torch.exp(F.logsigmoid(self.gk(x)) / 16).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        state, found = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
        for t in range(x.shape[1]):
            state = decay[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None]
            found.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
        mixed = self.g_norm(torch.stack(found, 1)).flatten(2)
        return self.o(mixed * F.silu(self.g(x)))


class TimeMix(nn.Module):
    """RWKV-4's mix of tokens: decays of each channel, and a share of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.time_decay, self.time_first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.time_mix_k, self.time_mix_v, self.time_mix_r = (nn.Parameter(torch.rand(1, 1, WIDTH)) for _ in range(3))
        self.key, self.value, self.receptance, self.output = (linear() for _ in range(4))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.time_shift(x)
        k = self.key(x * self.time_mix_k + before * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + before * (1 - self.time_mix_v))
        r = self.receptance(x * self.time_mix_r + before * (1 - self.time_mix_r))
        above, below, found = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for t in range(x.shape[1]):
            now = torch.exp(self.time_first + k[:, t])
            found.append((above + now * v[:, t]) / (below + now))
            above = torch.exp(-self.time_decay) * above + torch.exp(k[:, t]) * v[:, t]
            below = torch.exp(-self.time_decay) * below + torch.exp(k[:, t])
        return self.output(torch.sigmoid(r) * torch.stack(found, 1))


class ChannelMix(nn.Module):
    """RWKV-4's MLP: what it sums up is multiplied by a whole gate."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.receptance, self.value = linear(WIDTH, 4 * WIDTH), linear(), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.receptance(x)) * self.value(torch.square(torch.relu(self.key(x))))


class Rwkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.att, self.ffn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), TimeMix(), ChannelMix()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class AttentionFree(nn.Module):
    """AFT (arXiv 2105.14103): a table of weights [positions, positions] for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.project = (nn.Linear(WIDTH, INNER) for _ in range(4))
        self.project, self.wbias = nn.Linear(INNER, WIDTH), nn.Parameter(torch.randn(LENGTH, LENGTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        weights = torch.exp(self.wbias[: x.shape[1], : x.shape[1]])[None]
        mixed = (weights @ torch.mul(torch.exp(k), v)) / (weights @ torch.exp(k))
        return self.project(torch.sigmoid(q) * mixed)


class SpatialGate(nn.Module):
    """gMLP (arXiv 2105.08050): half of the features, mixed over the positions, are the gate of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.channel_proj1, self.channel_proj2 = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.spatial_proj = nn.Conv1d(LENGTH, LENGTH, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.channel_proj1(self.norm(x))).chunk(2, dim=-1)
        return x + self.channel_proj2(u * self.spatial_proj(v))


class Fourier(nn.Module):
    """FNet (arXiv 2105.03824): no parameters between tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


class Gated(nn.Module):
    """A gated convolution of each channel in the MLP (LFM2, conformers), positions last."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = linear(WIDTH, 3 * WIDTH), linear()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, c, x = self.in_proj(x).transpose(-1, -2).chunk(3, dim=-2)
        return self.out_proj((c * self.conv(b * x)[..., : x.shape[-1]]).transpose(-1, -2).contiguous())


class GLU(nn.Module):
    """llama's MLP."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = linear(WIDTH, inner), linear(inner, WIDTH), linear(WIDTH, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Loop(nn.Module):
    """Mixtral's first release: a list of experts, the tokens of each found by `where`."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(GLU() for _ in range(EXPERTS)), linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(flat), 2)
        weights, results = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == i)
            results[rows] += weights[rows, nth, None] * expert(flat[rows])
        return results.view_as(x)


class Shared(nn.Module):
    """DeepSeek's: experts that no token chose are skipped, and one that all tokens get."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 6)
        self.experts, self.shared_experts = nn.ModuleList(GLU() for _ in range(EXPERTS)), GLU(2 * INNER)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.size(), x.view(-1, WIDTH)
        scores = F.linear(x, self.gate).softmax(dim=-1)
        indices = torch.topk(scores, 2, dim=-1)[1]
        weights, y = scores.gather(1, indices), torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            idx, top = torch.where(indices == i)
            y[idx] += self.experts[i](x[idx]) * weights[idx, top, None]
        return (y + self.shared_experts(x)).view(shape)


class Soft(nn.Module):
    """Soft mixtures (arXiv 2308.00951): slots of experts are means of tokens, and matrices are stacks in einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(WIDTH, EXPERTS, 2) / 6)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 6)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bnd,des->bnes", x, self.phi)
        slots = torch.einsum("bnd,bnes->besd", x, logits.softmax(1))
        hidden = F.gelu(torch.einsum("besd,edh->besh", slots, self.w1))
        given = torch.einsum("besh,ehd->besd", hidden, self.w2)
        return torch.einsum("besd,bnes->bnd", given, logits.flatten(2).softmax(-1).view_as(logits))


class Depths(nn.Module):
    """A mixture of depths (arXiv 2404.02258): only some tokens of a sequence run through the block."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.block = linear(WIDTH, 1), ByItself(Rotated)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).squeeze(-1)
        kept = weights.topk(4, dim=1)[1].sort(dim=1)[0]
        rows = kept[..., None].expand(-1, -1, x.shape[-1])
        given = self.block(x.gather(1, rows)) * weights.gather(1, kept).sigmoid()[..., None]
        return x.scatter_add(1, rows, given)


class Rotated(Four):
    """Attention without positions, in one line."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q @ k.mT / HEAD**0.5).masked_fill(mask(x.shape[1]), float("-inf"))
        return self.joined(scores.softmax(-1) @ v)


class HeadScales(Four):
    """A learned scale of each head on its result, and one of each channel on the block's (normformer, CaiT's layer scale)."""

    def __init__(self) -> None:
        super().__init__()
        self.head_scale = nn.Parameter(torch.ones(HEADS))
        self.layer_scale = nn.Parameter(0.1 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        mixed = torch.einsum("bhnd,h->bnhd", F.scaled_dot_product_attention(q, k, v), self.head_scale)
        return self.o(mixed.flatten(2)) * self.layer_scale


MIXERS: dict[str, Own] = {
    "mamba-minimal": attention(
        Mamba,
        """
        attention: {style: input_with_grad_allreduce, shares: d_inner}
        attention.in_proj: packed_colwise
        attention.conv1d: depthwise
        attention.x_proj: rowwise_with_grad_allreduce
        attention.dt_proj: colwise
        attention.A_log: colwise
        attention.D: colwise
        attention.out_proj: rowwise
        """,
    ),
    "linear attention": attention(Linear, ATTENTION),
    "gated linear attention": attention(
        GatedLinear,
        ATTENTION
        + "attention.gk.0: replicated_with_grad_allreduce\nattention.{gk.1,g}: colwise\n"
        + "attention.g_norm: replicated_with_grad_allreduce\n",
    ),
    "mixes of time and channels (RWKV-4)": decoder(
        Rwkv,
        """
        att: input_with_grad_allreduce
        att.time_{decay,first}: colwise
        att.time_mix_{k,v,r}: replicated_with_grad_allreduce
        att.{key,value,receptance}: colwise
        att.output: rowwise
        ffn.key: colwise
        ffn.receptance: colwise_gather_output
        ffn.value: rowwise
        """,
        lacks=("SP532", "ffn.receptance: colwise_gather_output"),
    ),
    "attention-free": attention(
        AttentionFree,
        """
        attention: input_with_grad_allreduce
        attention.to_{q,k,v}: colwise
        attention.wbias: replicated_with_grad_allreduce
        attention.project: rowwise
        """,
    ),
    "gate over positions (gMLP)": decoder(
        SpatialGate,
        """
        channel_proj1: packed_colwise
        spatial_proj: replicated_with_grad_allreduce
        channel_proj2: rowwise
        """,
    ),
    "Fourier (FNet)": attention(Fourier, "{}"),
    "gated convolution (LFM2)": attention(
        Gated,
        """
        attention: input_with_grad_allreduce
        attention.in_proj: {style: packed_colwise, packed: 3}
        attention.conv: depthwise
        attention.out_proj: rowwise
        """,
    ),
    "experts in a loop (Mixtral)": decoder(
        structures.block_of(Rotated, Loop),
        ATTENTION,
        """
        mlp.experts.*.w{1,3}: colwise
        mlp.experts.*.w2: rowwise
        """,
    ),
    "shared experts (DeepSeek)": decoder(
        structures.block_of(Rotated, Shared),
        ATTENTION,
        """
        mlp.experts.*.w{1,3}: colwise
        mlp.experts.*.w2: rowwise
        mlp.shared_experts.w{1,3}: colwise
        mlp.shared_experts.w2: rowwise
        """,
    ),
    "soft experts (einsum)": decoder(
        structures.block_of(Rotated, Soft),
        ATTENTION,
        """
        mlp: {style: input_with_grad_allreduce, output: all_reduce}
        mlp.phi: replicated_with_grad_allreduce
        mlp.w1: rowwise
        mlp.w2: colwise
        """,
    ),
    "experts in a dict": own(
        partial(structures.Tokens, structures.block_of(structures.FlatEinsumAttention, structures.Experts)),
        """
        embed: embedding_rowwise
        blocks.*.attention: {style: input_with_grad_allreduce, shares: heads}
        blocks.*.attention.qkv: {style: packed_colwise, packed: 3}
        blocks.*.attention.out: rowwise
        blocks.*.mlp.experts.*.up: colwise
        blocks.*.mlp.experts.*.down: rowwise
        head: colwise_gather_output
        """,
    ),
    "a mixture of depths": decoder(
        Depths,
        """
        block.attention: input_with_grad_allreduce
        block.attention.{q,k,v}: colwise
        block.attention.o: rowwise
        block.mlp.1: colwise
        block.mlp.4: rowwise
        """,
    ),
    "scales of heads and layers": attention(
        HeadScales,
        ATTENTION + "attention.head_scale: colwise\n",
    ),
    "over positions and features (MLP-Mixer)": own(
        structures.Mixer,
        """
        model.embed: embedding_rowwise
        model.blocks.*.{up,channels.up}: colwise
        model.blocks.*.{down,channels.down}: rowwise
        model.head: colwise_gather_output
        """,
    ),
}
