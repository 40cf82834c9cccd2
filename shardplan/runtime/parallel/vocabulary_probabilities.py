"""Log-probabilities from logits that are split over the vocabulary (Megatron-LM's vocabulary-parallel loss, arXiv
1909.08053).

The logits are never gathered: two all-reduces, of one number per token (the maximum) and of one more than there are
targets (the sum of exponentials, the targets' logits). Chunks of the sequence bound the memory in between; they do not
communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardplan.torchlib.private import private

from .fused_logits import FusedLogits
from .process_groups import Group
from .vocabulary_filter import least_logits
from .vocabulary_logits import IGNORE_INDEX, Split, read_chunk, read_logits, read_temperature
from .vocabulary_sums import sums_of

OWN_TOKENS = ContextVar(
    "OWN_TOKENS", default=False
)  # whether a rank of cp has the logits of its own tokens, inside of `context_parallel`


def accumulated(x: Tensor, temperature: float, least: Tensor | None = None) -> Tensor:
    """A fresh copy of logits in float32 (float64 stays), divided by the temperature; -inf below `least`, [..., 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    if temperature != 1.0:
        wide.div_(temperature)
    return wide if least is None else wide.masked_fill_(x < least, -torch.inf)


def _sums(x: Tensor, temperature: float, chunk: int, moment: bool, least: Tensor | None) -> tuple[Tensor, ...]:
    found = [
        _sums_of_piece(piece, temperature, moment, part)
        for piece, part in zip(x.split(chunk, -2), parts_of(least, x, chunk), strict=True)
    ]
    return tuple(torch.cat(parts, -2) for parts in zip(*found, strict=True))


def parts_of(least: Tensor | None, x: Tensor, chunk: int) -> Sequence[Tensor | None]:
    """The chunks of `least` along its tokens; None for each chunk where it is None."""
    return [None] * len(x.split(chunk, -2)) if least is None else least.split(chunk, -2)


def _sums_of_piece(x: Tensor, temperature: float, moment: bool, least: Tensor | None) -> tuple[Tensor, ...]:
    above = accumulated(x, temperature, least)
    maximum = above.new_full((*x.shape[:-1], 1), -torch.inf) if x.shape[-1] == 0 else above.amax(-1, keepdim=True)
    above.sub_(maximum.masked_fill(maximum == -torch.inf, 0.0))
    if not moment:
        return maximum, above.exp_().sum(-1, keepdim=True)
    exponentials = above.exp()
    weighted = above.clamp_min_(torch.finfo(above.dtype).min).mul_(exponentials)  # a logit of -inf weighs nothing
    return maximum, exponentials.sum(-1, keepdim=True), weighted.sum(-1, keepdim=True)


_sums_per_rank = private("run_per_rank")(_sums)


@dataclass(frozen=True, slots=True)
class Normalizers:
    """What turns a logit into a probability: exp(logit / temperature - maximum - log_total). All are [..., tokens, 1].

    Args:
        moment: the mean over the vocabulary of (logit / temperature - maximum), where it was asked for.
        others: the sums of what came along, [..., tokens, n].
    """

    maximum: Tensor
    log_total: Tensor
    moment: Tensor | None
    others: Tensor | None


def normalizers(
    x: Tensor,
    split: Split,
    temperature: float,
    chunk: int,
    *,
    moment: bool = False,
    others: Callable[[Tensor], Tensor] | None = None,
    least: Tensor | None = None,
) -> Normalizers:
    """Two all-reduces of one and a few numbers per token.

    Args:
        x: [..., tokens, columns], this rank's.
        others: from the maximum, what else is to be summed over the ranks, [..., tokens, n].
        least: [..., tokens, 1], the least logit that counts.
    """
    own, *sums = _sums_per_rank(x, temperature, chunk, moment, least)
    maximum = split.reduce(own, "max")
    scale = (own - maximum).exp()
    addends = [sums[0] * scale]
    if moment:
        below = (own - maximum).clamp_min(torch.finfo(own.dtype).min)
        addends.append((sums[1] + sums[0] * below) * scale)
    if others is not None:
        addends.append(others(maximum))
    total = split.reduce(torch.cat(addends, -1))
    return Normalizers(
        maximum,
        total[..., :1].log(),
        total[..., 1:2] / total[..., :1] if moment else None,
        total[..., 1 + moment :] if others is not None else None,
    )


def pieces(chunk: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The chunks of several tensors [..., tokens, n] along their tokens."""
    return zip(*(tensor.split(chunk, -2) for tensor in tensors), strict=True)


def log_probabilities_of_piece(
    x: Tensor, maximum: Tensor, log_total: Tensor, temperature: float, least: Tensor | None = None
) -> Tensor:
    """The log-probability of every column, fresh."""
    return accumulated(x, temperature, least).sub_(maximum).sub_(log_total)


def _chosen(
    x: Tensor, maximum: Tensor, column: Tensor, on_other_rank: Tensor, temperature: float, least: Tensor | None
) -> Tensor:
    if x.shape[-1] == 0:
        return maximum.new_zeros(column.shape)
    return (accumulated(x.gather(-1, column), temperature, least) - maximum).masked_fill(on_other_rank, 0.0)


_chosen_per_rank = private("run_per_rank")(_chosen)


def _gradient(
    x: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    column: Tensor,
    on_other_rank: Tensor,
    least: Tensor | None,
    gradient: Tensor,
    temperature: float,
    chunk: int,
) -> Tensor:
    result = torch.empty_like(x)
    if x.shape[-1] == 0:
        return result
    own = gradient.masked_fill(on_other_rank, 0.0)
    if least is not None:
        own = own.masked_fill(x.gather(-1, column) < least, 0.0)
    total = -gradient.sum(-1, keepdim=True)
    named = zip(
        pieces(chunk, result, x, maximum, log_total, column, own, total), parts_of(least, x, chunk), strict=True
    )
    for (out, piece, m, t, c, g, s), part in named:
        probabilities = log_probabilities_of_piece(piece, m, t, temperature, part).exp_()
        out.copy_(probabilities.mul_(s).scatter_add_(-1, c, g).div_(temperature))
    return result


_gradient_per_rank = private("run_per_rank")(_gradient)


class _LogProbabilities(torch.autograd.Function):
    """Saves the logits as they are, no probabilities: backward computes them anew, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, split: Split, temperature: float, chunk: int, least: Tensor | None
    ) -> Tensor:
        column, on_other_rank = split.locate(target, x.shape[-1])
        known = normalizers(
            x,
            split,
            temperature,
            chunk,
            others=lambda maximum: _chosen_per_rank(x, maximum, column, on_other_rank, temperature, least),
            least=least,
        )
        ctx.save_for_backward(x, known.maximum, known.log_total, column, on_other_rank, least)
        ctx.options = (temperature, chunk)
        assert known.others is not None  # they were asked for
        return known.others - known.log_total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _gradient_per_rank(*ctx.saved_tensors, gradient, *ctx.options), None, None, None, None, None


def refuse_shift_of_chunk(instead: str) -> None:
    """Raise ValueError inside of `context_parallel`: the last token of a chunk is judged by the first of the next one, which another
    rank has."""
    if OWN_TOKENS.get():
        raise ValueError(
            "inside of context_parallel a rank has its own tokens, and shifting them would leave out the token at its end: pass "
            f"labels= to context_parallel, which shifts the whole sequence, and call {instead} with the inputs that it gives"
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

    Memory beside the logits: one chunk in float32, forward and backward, and in backward the logits' gradient, in their
    dtype. The logits themselves are kept for backward; without gradients nothing is.

    Args:
        logits: [..., tokens, vocabulary], on every rank whole (a plain tensor, or a DTensor Replicate), or a DTensor
            Shard(-1) on a one-dimensional mesh, or this rank's columns with `group`, or fused ones.
        target: [..., tokens], ids of the whole vocabulary; or [..., tokens, n], several candidates for each token.
        temperature: the logits are divided by it.
        ignore_index: a target that gives 0, and no gradient.
        mask: as the target or the input ids, or [..., tokens]; where it is 0 or False the result is 0, without a gradient.
        shift: the target is the input ids: position i is judged by token i + 1, and the result has one token less. Not of a chunk of
            a sequence (`context_parallel`): its `shift_labels` are targets that need no shift.
        chunk_size: tokens that are worked on at a time; None is all.
        top_k: of each token's distribution only the k largest logits count, and all that equal the k-th; the others are
            -inf, so a target among them gets -inf, and they get no gradient. None is all.
        top_p: of those, in falling order, as many count as have this much probability together, at least one, and all
            that equal the last of them (nucleus sampling, arXiv 1904.09751); 1 is all. The rows are made whole for
            it, each on one rank: an all-to-all of a chunk of logits.
        group: where the logits are this rank's columns, the group or one-dimensional mesh that they are split over, in
            ceil-chunks.
        vocab_size: of the whole vocabulary; needed with `group`.

    Returns:
        The target's shape, a plain tensor, equal on all ranks. NaN for a target that is no token of the vocabulary.

    Raises:
        TypeError: a DTensor that is split otherwise; `top_k` or `top_p` of fused logits.
        ValueError: shapes or sizes that do not fit; `shift` inside of `context_parallel`.
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
        sums = sums_of(x.rows(temperature), ids, chunk=chunk_size)
        result = sums.chosen - sums.total.unsqueeze(-1)
    else:
        result = _LogProbabilities.apply(x, ids, split, temperature, chunk, least)
    result = result if several else result.squeeze(-1)
    result = result.masked_fill(unknown, torch.nan).masked_fill(ignored, 0.0)
    return result[..., :-1] if shift else result
