"""Sums that losses need of each token's logits: the logarithm of the sum of their exponentials, the log-probabilities of some ids, a
weighted sum of all, the entropy. The logits may be split over the vocabulary (Megatron-LM's vocabulary-parallel loss, arXiv 1909.08053),
and are made a chunk of tokens at a time.

Two all-reduces of one and a few numbers per token, whatever the chunks are; backward communicates nothing. It keeps nothing of the size
of the logits: backward makes each chunk anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardplan.torchlib.private import private

from .second_derivatives import refuse_second_derivatives
from .vocabulary_logits import Split

ELEMENTS = 2**25  # elements of a chunk of logits: 128 MiB in float32


def tokens_of_chunk(columns: int) -> int:
    """The default number of tokens to process at a time: with this many columns their logits have at most ELEMENTS elements."""
    return max(1, ELEMENTS // max(columns, 1))


@dataclass(frozen=True, slots=True)
class Head:
    """The map from hidden states to logits.

    Args:
        weight: this rank's, [columns, features].
        bias: [columns].
        change: the elementwise changes that the model's code makes to the logits, from [tokens, columns] and `operands`; None: none.
        operands: tensors that `change` reads.
    """

    weight: Tensor
    bias: Tensor | None
    change: Callable[[Tensor, Sequence[Tensor]], Tensor] | None
    operands: tuple[Tensor, ...]

    def linear(self, hidden: Tensor) -> Tensor:
        """The head's logits, [tokens, columns]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        made = self.linear(hidden)
        return made if self.change is None else self.change(made, self.operands)


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits, or the hidden states and head that give them.

    Args:
        values: this rank's logits, [..., tokens, columns]; with a head, hidden states, [..., tokens, features].
        columns: the number of this rank's columns.
        split: how the vocabulary is split.
        temperature: the logits are divided by it.
        least: [..., tokens, 1], the smallest logit that counts, before that division; smaller ones become -inf. Only without a head.
    """

    values: Tensor
    columns: int
    split: Split
    head: Head | None = None
    temperature: float = 1.0
    least: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums for each token, in float32 (float64 for logits in float64).

    Args:
        total: [..., tokens], the logarithm of the sum of the exponentials of all logits.
        logs: [..., tokens, n], the log-probabilities of the ids; undefined for an id outside of the vocabulary.
        weighed: [..., tokens], the weighted sum of all logits; zeros without weights.
        entropy: [..., tokens], in nats, if requested, else zeros.
    """

    total: Tensor
    logs: Tensor
    weighed: Tensor
    entropy: Tensor


def sums_of(
    rows: Rows, ids: Tensor, weights: Tensor | None = None, chunk: int | None = None, *, entropy: bool = False
) -> Sums:
    """Compute the sums. They are differentiable in the values and the head's tensors.

    Args:
        ids: [..., tokens, n], of the whole vocabulary.
        weights: [vocabulary], or one scalar for the whole vocabulary.
        chunk: tokens of each sequence that are processed at a time; None: `tokens_of_chunk` for all sequences.
        entropy: whether it is needed; it takes a second chunk.
    """
    shape, sequences, head = ids.shape[:-1], max(math.prod(ids.shape[:-2]), 1), rows.head
    if weights is not None and weights.ndim:
        weights = weights[rows.split.first : rows.split.first + rows.columns]
    values, flat = rows.values, ids
    tensors: tuple[Tensor | None, ...] = ()
    if head is not None:  # a head multiplies matrices, so all sequences become one
        values, flat, tensors = values.flatten(0, -2), ids.flatten(0, -2), (head.weight, head.bias, *head.operands)
        chunk, sequences = chunk and chunk * sequences, 1
    how = _How(
        None if head is None else head.change,
        rows.temperature,
        chunk or max(1, tokens_of_chunk(rows.columns) // sequences),
        entropy,
    )
    total, logs, weighed, entropies = _Sums.apply(values, flat, weights, rows, how, *tensors)
    return Sums(total.view(shape), logs.view(ids.shape), weighed.view(shape), entropies.view(shape))


@dataclass(frozen=True, slots=True)
class _How:
    """The options: the change of the head, the temperature, tokens of a chunk, and whether the entropy is needed."""

    change: Callable[[Tensor, Sequence[Tensor]], Tensor] | None
    temperature: float
    chunk: int
    entropy: bool

    def head(self, tensors: Sequence[Tensor | None]) -> Head | None:
        """The head with these tensors, which autograd knows."""
        if not tensors:
            return None
        weight, bias, *operands = tensors
        assert weight is not None
        return Head(weight, bias, self.change, tuple(x for x in operands if x is not None))

    def wide(self, logits: Tensor, fresh: bool, least: Tensor | None) -> tuple[Tensor, bool]:
        """The final logits, in float32 at least; and whether they may be changed in place. `fresh`: whether the given ones may be."""
        wide = logits.to(_accumulating(logits.dtype))
        fresh = fresh or wide is not logits
        if self.temperature != 1.0:
            wide, fresh = wide.div_(self.temperature) if fresh else wide / self.temperature, True
        if least is not None:
            below = logits < least
            wide, fresh = (wide.masked_fill_ if fresh else wide.masked_fill)(below, -torch.inf), True
        return wide, fresh

    def pieces(self, least: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """The chunks along the tokens; `least` comes last."""
        split = [x.split(self.chunk, -2) for x in tensors]
        parts = [None] * len(split[0]) if least is None else least.split(self.chunk, -2)
        return zip(*split, parts, strict=True)


class _Sums(torch.autograd.Function):
    """Saves the inputs of the logits, and a few numbers for each token."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, ids: Tensor, weights: Tensor | None, rows: Rows, how: _How, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        column, elsewhere = rows.split.locate(ids, rows.columns)
        own, exponentials, chosen, *others = _own_sums_per_rank(how, values, column, weights, rows.least, *tensors)
        maximum = rows.split.reduce(own, "max")
        scale = (own - maximum).exp()
        addends = [exponentials * scale, (chosen - maximum).masked_fill(elsewhere, 0.0)]
        if weights is not None:
            addends.append(others[0])
        if how.entropy:
            below = (own - maximum).clamp_min(torch.finfo(own.dtype).min)
            addends.append((others[-1] + exponentials * below) * scale)
        total, *summed = rows.split.reduce(torch.cat(addends, -1)).split([x.shape[-1] for x in addends], -1)
        log_total = total.log()
        none = torch.zeros_like(log_total)
        weighed = none if weights is None else summed[1]
        entropies = log_total - summed[-1] / total if how.entropy else none
        known = (maximum, log_total, entropies if how.entropy else log_total)
        ctx.save_for_backward(values, column, elsewhere, weights, rows.least, *known, *tensors)
        ctx.how = how
        logs = summed[0] - log_total
        return (maximum + log_total).squeeze(-1), logs, weighed.squeeze(-1), entropies.squeeze(-1)

    @staticmethod
    def backward(
        ctx: Any, of_total: Tensor, of_logs: Tensor, of_weighed: Tensor, of_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        given = (of_total.unsqueeze(-1), of_logs, of_weighed.unsqueeze(-1), of_entropy.unsqueeze(-1))
        needed = ctx.needs_input_grad
        if len(needed) == FIRST_TENSOR:
            of_values: Tensor | None = _logits_gradient_per_rank(ctx.how, given, *ctx.saved_tensors)
            return of_values, None, None, None, None
        found = _gradients(ctx.how, given, needed, *ctx.saved_tensors)
        return (found.of_values, None, None, None, None, *found.of_tensors())


FIRST_TENSOR = 5  # the head's first tensor among the arguments of `_Sums`


def _own_sums(
    how: _How, values: Tensor, column: Tensor, weights: Tensor | None, least: Tensor | None, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """For this rank's columns and each token: the maximum, the sum of exponentials relative to it, the logits of the columns, the weighted
    sum, and for the entropy the sum of each logit's distance to the maximum times its exponential."""
    head = how.head(tensors)
    found = [
        _of_piece(*how.wide(x if head is None else head.logits(x), head is not None, part), at, weights, how.entropy)
        for x, at, part in how.pieces(least, values, column)
    ]
    return tuple(torch.cat(parts, -2) for parts in zip(*found, strict=True))


_own_sums_per_rank = private("run_per_rank")(_own_sums)


def _gradients(
    how: _How,
    given: Sequence[Tensor],
    needed: Sequence[bool],
    values: Tensor,
    column: Tensor,
    elsewhere: Tensor,
    weights: Tensor | None,
    least: Tensor | None,
    maximum: Tensor,
    log_total: Tensor,
    entropies: Tensor,
    *tensors: Tensor | None,
) -> _Gradients:
    found = _Gradients(how.head(tensors), values if needed[0] else None, needed[FIRST_TENSOR:])
    of_total, of_logs, of_weighed, of_entropy = given
    of_total = of_total - of_logs.sum(-1, keepdim=True)
    of_logs = of_logs.masked_fill(elsewhere, 0.0)
    if least is not None and values.shape[-1]:
        of_logs = of_logs.masked_fill(values.gather(-1, column) < least, 0.0)
    every = (values, column, maximum, log_total, entropies, of_total, of_logs, of_weighed, of_entropy)
    for i, (x, *known, part) in enumerate(how.pieces(least, *every)):
        found.add(i * how.chunk, x, partial(_of_logits, how, weights, known, part))
    return found


def _of_logits(
    how: _How, weights: Tensor | None, known: Sequence[Tensor], least: Tensor | None, logits: Tensor, fresh: bool
) -> Tensor:
    """The gradient of a chunk of logits, in float32 at least. It may change fresh logits in place."""
    column, maximum, log_total, entropies, of_total, of_logs, of_weighed, of_entropy = known
    wide, fresh = how.wide(logits, fresh, least)
    logs = (wide.sub_(maximum) if fresh else wide - maximum).sub_(log_total)
    if how.entropy:
        logs.clamp_min_(torch.finfo(logs.dtype).min)  # a logit of -inf weighs nothing
        made = logs.exp()
        made.mul_(logs.add_(entropies).mul_(of_entropy).neg_().add_(of_total))
    else:
        made = logs.exp_().mul_(of_total)
    if made.shape[-1]:
        made.scatter_add_(-1, column, of_logs)
    if weights is not None:
        made.add_(of_weighed * weights.to(made.dtype))
    return made if how.temperature == 1.0 else made.div_(how.temperature)


def _logits_gradient(how: _How, given: Sequence[Tensor], *saved: Any) -> Tensor:
    made = _gradients(how, given, (True,), *saved).of_values
    assert made is not None
    return made


_logits_gradient_per_rank = private("run_per_rank")(_logits_gradient)


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_piece(x: Tensor, fresh: bool, column: Tensor, weights: Tensor | None, entropy: bool) -> tuple[Tensor, ...]:
    none = x.new_zeros(*x.shape[:-1], 1)
    if not x.shape[-1]:
        made = (none - torch.inf, none, x.new_zeros(column.shape), none)
        return (*made, none) if entropy else made
    chosen, weighed = x.gather(-1, column), none
    if weights is not None:
        weighed = (x @ weights.to(x.dtype) if weights.ndim else x.sum(-1) * weights).unsqueeze(-1)
    maximum = x.amax(-1, keepdim=True)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    below = x.sub_(shift) if fresh else x - shift
    if not entropy:
        return maximum, below.exp_().sum(-1, keepdim=True), chosen, weighed
    exponentials = below.exp()
    moment = below.clamp_min_(torch.finfo(x.dtype).min).mul_(exponentials).sum(-1, keepdim=True)
    return maximum, exponentials.sum(-1, keepdim=True), chosen, weighed, moment


class _Gradients:
    """The gradients of the values and of the head's tensors, summed over chunks; the head's in float32 at least."""

    def __init__(self, head: Head | None, values: Tensor | None, tensors: Sequence[bool]) -> None:
        self.head, self.of_values = head, None if values is None else torch.empty_like(values)
        self.weight, self.bias, *self.operands = tensors if head is not None else (False, False)
        self.sums: dict[int, Tensor] = {}

    def add(self, start: int, x: Tensor, gradient: Callable[[Tensor, bool], Tensor]) -> None:
        """Add a chunk of the values, from token `start`, and the gradient of its logits, in float32 at least."""
        head, of_x = self.head, None if self.of_values is None else self.of_values.narrow(-2, start, x.shape[-2])
        if head is None:
            if of_x is not None:
                of_x.copy_(gradient(x, False))
            return
        made = head.linear(x)
        of_operands: list[tuple[int, Tensor]] = []
        if head.change is None:
            of_made = gradient(made, True).to(made.dtype)
        else:
            of_made, of_operands = self._through(head.change, made, gradient)
        del made
        if of_x is not None:
            torch.mm(of_made, head.weight, out=of_x)
        if self.weight:
            into = self._sum(0, head.weight)
            if into.dtype == x.dtype:
                into.addmm_(of_made.T, x)
            else:
                into.add_(of_made.T @ x)
        if self.bias and head.bias is not None:
            self._sum(1, head.bias).add_(of_made.sum(0, dtype=_accumulating(of_made.dtype)))
        for i, of_operand in of_operands:
            self._sum(2 + i, of_operand).add_(of_operand)

    def _through(
        self,
        change: Callable[[Tensor, Sequence[Tensor]], Tensor],
        made: Tensor,
        gradient: Callable[[Tensor, bool], Tensor],
    ) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        assert self.head is not None
        with torch.enable_grad():
            made = made.detach().requires_grad_()
            operands = [
                x.detach().requires_grad_() if trained else x.detach()
                for x, trained in zip(self.head.operands, self.operands, strict=True)
            ]
            logits = change(made, operands)
            wide = logits.to(_accumulating(logits.dtype))
        trained = [i for i, one in enumerate(operands) if one.requires_grad]
        of_made, *others = torch.autograd.grad(
            wide,
            [made, *(operands[i] for i in trained)],
            gradient(wide.detach(), wide is not logits),
            materialize_grads=True,
        )
        return of_made, list(zip(trained, others, strict=True))

    def _sum(self, place: int, like: Tensor) -> Tensor:
        if place not in self.sums:
            self.sums[place] = torch.zeros_like(like, dtype=_accumulating(like.dtype))
        return self.sums[place]

    def of_tensors(self) -> list[Tensor | None]:
        if self.head is None:
            return []
        tensors = (self.head.weight, self.head.bias, *self.head.operands)
        needed = (self.weight, self.bias, *self.operands)
        return [
            self.sums[i].to(x.dtype) if need and x is not None else None
            for i, (x, need) in enumerate(zip(tensors, needed, strict=True))
        ]
