"""The entropy of next-token distributions whose logits may be split over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from .fused_logits import FusedLogits
from .process_groups import Group
from .vocabulary_logits import read_chunk, read_logits, read_temperature
from .vocabulary_sums import Rows, sums_of


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

    Two all-reduces of one and two numbers per token. Memory besides the logits: two chunks in float32, in forward and
    backward, and in backward the logits' gradient, in their dtype. The logits themselves are kept for backward.

    Args:
        logits, temperature, chunk_size, group, vocab_size: as in `log_probabilities`. A logit of -inf is a token with
            probability 0; it adds nothing.
        mask: [..., tokens]; where it is 0 or False the result is 0, without a gradient.

    Returns:
        [..., tokens], a plain tensor, equal on all ranks.

    Raises:
        TypeError: a DTensor with another split.
        ValueError: shapes or sizes do not fit.
    """
    temperature = read_temperature(temperature)
    chunk: int | None = read_chunk(chunk_size, logits.shape[-2] if logits.ndim > 1 else 1)
    if isinstance(logits, FusedLogits):
        if group is not None:
            raise TypeError("fused logits take no group: pass logits.make()")
        rows, chunk = logits.rows(temperature), chunk_size
    else:
        x, split = read_logits(logits, group, vocab_size)
        rows = Rows(x, x.shape[-1], split, temperature=temperature)
    if mask is not None and mask.shape != rows.values.shape[:-1]:
        raise ValueError(f"the mask's shape is {tuple(mask.shape)}, for logits of {tuple(logits.shape)}")
    none = torch.empty((*rows.values.shape[:-1], 0), dtype=torch.int64, device=rows.values.device)
    result = sums_of(rows, none, chunk=chunk, entropy=True).entropy
    return result if mask is None else result.masked_fill(~mask.bool(), 0.0)
