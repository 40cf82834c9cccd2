"""Log-probabilities, entropies and the largest of logits that may be split over the vocabulary.

The logits are never gathered. For log-probabilities there are two all-reduces: of one number per token (the maximum), and of one more than
the number of targets (the sum of exponentials, the targets' logits). Chunks of the sequence bound the temporary memory;
they do not communicate.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from shardplan.torchlib.private import private

from .chunks import chunk_size
from .collectives import all_gather, all_to_all
from .fused_logits import FusedLogits
from .process_groups import Group
from .second_derivatives import refuse_second_derivatives
from .vocabulary_logits import IGNORE_INDEX, Split, read_chunk, read_logits, read_temperature
from .vocabulary_sums import Rows, sums_of

OWN_TOKENS = ContextVar(
    "OWN_TOKENS", default=False
)  # whether a rank of cp has only its own tokens' logits, inside of `context_parallel`


def refuse_shift_of_chunk(instead: str) -> None:
    """Raise ValueError inside of `context_parallel`: the target of a chunk's last token is the first token of the next chunk, on
    another rank."""
    if OWN_TOKENS.get():
        raise ValueError(
            "inside context_parallel a rank has its own tokens, and shifting them would lose the token at its end: pass labels= to "
            f"context_parallel, which shifts the whole sequence, and call {instead} with the inputs that it gives"
        )


def log_probabilities(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
    mask: Tensor | None = None,
    shift: bool = False,
    chunk_size: int | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    group: Group | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The log-probability of each target token, in float32 (float64 for logits in float64).

    Memory besides the logits: one chunk in float32, in forward and backward, and in backward the logits' gradient, in
    their dtype. The logits themselves are kept for backward; without gradients nothing is kept.

    Args:
        logits: [..., tokens, vocabulary], whole on every rank (a plain tensor, or a DTensor Replicate), or a DTensor
            Shard(-1) on a one-dimensional mesh, or this rank's columns with `group`, or fused logits.
        target: [..., tokens], ids of the whole vocabulary; or [..., tokens, n], several candidates for each token.
        temperature: the logits are divided by it.
        ignore_index: a target that gives 0, and no gradient.
        mask: shaped like the target or the input ids, or [..., tokens]; where it is 0 or False the result is 0, without a gradient.
        shift: the target is the input ids: token i + 1 is the target of position i, and the result has one token less. Not for a
            chunk of a sequence (`context_parallel`): its `shift_labels` are targets that need no shift.
        chunk_size: tokens that are processed at a time; None: all.
        top_k: of each token's distribution only the k largest logits count, and all that equal the k-th; the others are -inf, so a
            target among them gets -inf, and they get no gradient. None: all count.
        top_p: of those only the most probable ones count, up to this total probability: at least one, and all that equal the last of
            them (nucleus sampling, arXiv 1904.09751); 1: all. Each row is made whole for it on one rank: an all-to-all of a chunk of
            logits.
        group: if the logits are this rank's columns, the group or one-dimensional mesh over which they are split, in ceil-chunks.
        vocab_size: the size of the whole vocabulary; needed with `group`.

    Returns:
        The target's shape, a plain tensor, equal on all ranks. NaN for a target outside of the vocabulary.

    Raises:
        TypeError: a DTensor with another split; `top_k` or `top_p` with fused logits.
        ValueError: shapes or sizes do not fit; `shift` inside of `context_parallel`.
    """
    if shift:
        refuse_shift_of_chunk("log_probabilities(logits, inputs['shift_labels'])")
    temperature, chunk = read_temperature(temperature), read_chunk(chunk_size, logits.shape[-2])
    fused = isinstance(logits, FusedLogits)
    if fused and (top_k is not None or top_p != 1 or group is not None):
        raise TypeError("fused logits take neither top_k nor top_p nor group: pass logits.make()")
    x, split = (
        (logits, logits.vocabulary) if isinstance(logits, FusedLogits) else read_logits(logits, group, vocab_size)
    )
    least = None if fused else least_logits(x, split, top_k, top_p, temperature, chunk)
    if shift:
        if target.ndim == x.ndim:
            raise ValueError("shift=True is for input ids [..., tokens], not for several candidates per token")
        target = torch.nn.functional.pad(target[..., 1:], (0, 1), value=ignore_index)
        if mask is not None:
            mask = torch.nn.functional.pad(mask[..., 1:], (0, 1))
    several = target.ndim == x.ndim
    if target.shape[: x.ndim - 1] != x.shape[:-1] or target.ndim not in (x.ndim - 1, x.ndim):
        raise ValueError(f"the target's shape is {tuple(target.shape)}, for logits of {tuple(logits.shape)}")
    ignored = target == ignore_index
    if mask is not None:
        ignored = ignored | ~(mask.bool().unsqueeze(-1) if several and mask.ndim < target.ndim else mask.bool())
    ids = target.masked_fill(ignored, 0).long()
    unknown = (ids < 0) | (ids >= split.size)
    ids = ids if several else ids.unsqueeze(-1)
    if isinstance(x, FusedLogits):
        result = sums_of(x.rows(temperature), ids, chunk=chunk_size).logs
    else:
        rows = Rows(x, x.shape[-1], split, temperature=temperature, least=least)
        result = sums_of(rows, ids, chunk=chunk).logs
    result = result if several else result.squeeze(-1)
    result = result.masked_fill(unknown, torch.nan).masked_fill(ignored, 0.0)
    return result[..., :-1] if shift else result


# The tokens that count in a truncated distribution: the k largest logits, or those with most of the probability.
def least_logits(
    x: Tensor, split: Split, top_k: int | None, top_p: float, temperature: float, chunk: int
) -> Tensor | None:
    """The smallest logit of each token that counts, [..., tokens, 1]; None where all count. It has no gradient.

    Args:
        x: this rank's columns, [..., tokens, columns].
        top_k, top_p: as in `log_probabilities`.

    Raises:
        ValueError: top_k is not a number from 1 to the size of the vocabulary; top_p is not above 0 and at most 1.
    """
    if top_k is not None and not 1 <= top_k <= split.size:
        raise ValueError(f"top_k must be from 1 to the {split.size} tokens of the vocabulary, or None, not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
    if top_k is None and top_p == 1:
        return None
    with torch.no_grad():
        parts = [_least_of_piece(piece, split, top_k, top_p, temperature) for piece in x.detach().split(chunk, -2)]
        return torch.cat(parts, -2)


def _least_of_piece(x: Tensor, split: Split, top_k: int | None, top_p: float, temperature: float) -> Tensor:
    if top_p == 1:
        assert top_k is not None  # else all count
        return largest(x, top_k, split)[0][..., -1:]
    tokens = x.flatten(0, -2)
    rows = tokens if split.group is None else _whole_rows(tokens, split.size, split.group)
    values = rows.sort(dim=-1, descending=True).values
    wide = values.to(torch.promote_types(x.dtype, torch.float32)) / temperature
    if top_k is not None:
        wide = wide.masked_fill(values < values[..., top_k - 1 : top_k], -torch.inf)
    probabilities = wide.softmax(-1)
    above = probabilities.cumsum(-1) - probabilities  # of all larger ones
    count = (above < top_p).sum(-1, keepdim=True).clamp_min(1)
    least = values.gather(-1, count - 1)
    if top_k is not None:
        least = least.maximum(values[..., top_k - 1 : top_k])
    if split.group is not None:
        least = all_gather(least, split.group, 0, tokens.shape[0])
    return least.view(*x.shape[:-1], 1)


def _whole_rows(x: Tensor, vocabulary: int, group: Group) -> Tensor:
    """Exchange this rank's columns of all rows for all columns of its share of the rows (ceil-chunks)."""
    ranks = group.size()
    rows, columns = _chunks(x.shape[0], ranks), _chunks(vocabulary, ranks)
    own = rows[group.rank() if isinstance(group, torch.distributed.ProcessGroup) else group.get_local_rank()]
    sent = [count * x.shape[1] for count in rows]
    received = [own * count for count in columns]
    flat = all_to_all(x.reshape(-1), received, sent, group)
    return torch.cat([part.view(own, n) for part, n in zip(flat.split(received), columns, strict=True)], -1)


def _chunks(size: int, ranks: int) -> list[int]:
    chunk = chunk_size(size, ranks)
    return [min(chunk, max(0, size - rank * chunk)) for rank in range(ranks)]


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


# The largest logits, where logits may be split over the vocabulary.
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
