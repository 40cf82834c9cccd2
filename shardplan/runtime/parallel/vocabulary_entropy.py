"""The entropy of next-token distributions whose logits may be split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardplan.torchlib.private import private

from .process_groups import Group
from .vocabulary_logits import Split, read_chunk, read_logits, read_temperature
from .vocabulary_probabilities import log_probabilities_of_piece, normalizers, pieces


def _gradient(
    x: Tensor, maximum: Tensor, log_total: Tensor, result: Tensor, gradient: Tensor, temperature: float, chunk: int
) -> Tensor:
    into = torch.empty_like(x)
    for out, piece, m, t, h, g in pieces(chunk, into, x, maximum, log_total, result, gradient):
        logs = log_probabilities_of_piece(piece, m, t, temperature).clamp_min_(torch.finfo(h.dtype).min)
        out.copy_(logs.exp().mul_(logs.add_(h)).mul_(g).div_(-temperature))
    return into


_gradient_per_rank = private("run_per_rank")(_gradient)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, temperature: float, chunk: int) -> Tensor:
        known = normalizers(x, split, temperature, chunk, moment=True)
        assert known.moment is not None  # it was asked for
        result = known.log_total - known.moment
        ctx.save_for_backward(x, known.maximum, known.log_total, result)
        ctx.options = (temperature, chunk)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gradient_per_rank(*ctx.saved_tensors, gradient, *ctx.options), None, None, None


def entropy(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    chunk_size: int | None = None,
    group: Group | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The entropy of each token's distribution over the vocabulary, in nats, float32 (float64 for logits in float64).

    Two all-reduces of one and two numbers per token. Memory beside the logits: two chunks in float32, forward and
    backward, and in backward the logits' gradient, in their dtype. The logits themselves are kept for backward.

    Args:
        logits, temperature, chunk_size, group, vocab_size: as in `log_probabilities`. A logit of -inf is a token that
            cannot come; it adds nothing.
        mask: [..., tokens]; where it is 0 or False the result is 0, without a gradient.

    Returns:
        [..., tokens], a plain tensor, equal on all ranks.

    Raises:
        TypeError: a DTensor that is split otherwise.
        ValueError: shapes or sizes that do not fit.
    """
    x, split = read_logits(logits, group, vocab_size)
    chunk = read_chunk(chunk_size, x.shape[-2])
    if mask is not None and mask.shape != x.shape[:-1]:
        raise ValueError(f"the mask's shape is {tuple(mask.shape)}, for logits of {tuple(logits.shape)}")
    result = _Entropy.apply(x, split, read_temperature(temperature), chunk).squeeze(-1)
    return result if mask is None else result.masked_fill(~mask.bool(), 0.0)
