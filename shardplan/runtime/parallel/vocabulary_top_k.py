"""The largest logits, where logits may be split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardplan.torchlib.private import private

from .collectives import all_gather
from .process_groups import Group
from .second_derivatives import refuse_second_derivatives
from .vocabulary_logits import Split, read_logits

_NONE = -1  # in place of a token id, where a rank has fewer columns than requested


def _largest(x: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    """This rank's k largest; missing columns are filled with -inf."""
    own = min(k, x.shape[-1])
    values, ids = x.topk(own, -1) if own else (x, x.long())
    missing = (*x.shape[:-1], k - own)
    return (
        torch.cat([values, x.new_full(missing, -torch.inf)], -1),
        torch.cat([ids + first, ids.new_full(missing, _NONE)], -1),
    )


_largest_per_rank = private("run_per_rank")(_largest)


def _merge(x: Tensor, k: int, first: int, group: Group) -> tuple[Tensor, Tensor]:
    values, ids = _largest_per_rank(x, k, first)
    values, ids = all_gather(values, group, -1), all_gather(ids, group, -1)
    # The fill is at the end and the sort is stable, so a real logit of -inf comes before it.
    real_first = (ids == _NONE).to(torch.uint8).argsort(dim=-1, stable=True)
    values, ids = values.gather(-1, real_first), ids.gather(-1, real_first)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), ids.gather(-1, order[..., :k])


def _scatter(x: Tensor, column: Tensor, on_other_rank: Tensor, gradient: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    return result.scatter_add_(-1, column, gradient.masked_fill(on_other_rank, 0.0)) if x.shape[-1] else result


_scatter_per_rank = private("run_per_rank")(_scatter)


def largest(x: Tensor, k: int, split: Split) -> tuple[Tensor, Tensor]:
    """The k largest logits over all ranks' columns, without a gradient."""
    return x.topk(k, -1) if split.group is None else _merge(x, k, split.first, split.group)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int, split: Split) -> tuple[Tensor, Tensor]:
        values, ids = largest(x, k, split)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(x, *split.locate(ids, x.shape[-1]))
        return values, ids

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return _scatter_per_rank(*ctx.saved_tensors, gradient), None, None


def top_k(
    logits: Tensor, k: int, *, group: Group | None = None, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each token, like `torch.topk(logits, k)` of the whole logits.

    Every rank's own k largest are gathered, with their ids; that is the memory that it needs. Equal logits of one token
    may come in another order than torch's, the same on all ranks. `log_probabilities(logits, ids)` gives their
    log-probabilities.

    Args:
        logits, group, vocab_size: as in `log_probabilities`.

    Returns:
        (values, token ids), [..., tokens, k], largest first; plain tensors, equal on all ranks. Values have a gradient.

    Raises:
        TypeError: a DTensor with another split.
        ValueError: k is not a number from 1 to the size of the vocabulary; sizes do not fit.
    """
    x, split = read_logits(logits, group, vocab_size)
    if not 1 <= k <= split.size:
        raise ValueError(f"k must be from 1 to the {split.size} tokens of the vocabulary, not {k}")
    return _TopK.apply(x, k, split)
