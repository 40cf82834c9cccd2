"""What losses need of each token's logits, made a chunk of tokens at a time: the logarithm of the sum of their exponentials, those of
some ids, a weighted sum of all.

Two all-reduces of one and a few numbers per token, whatever the chunks are; backward communicates nothing. Nothing of the size of
the logits is kept for it: it makes each chunk anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .vocabulary_logits import Split

ELEMENTS = 2**25  # of a chunk of logits: 128 MiB in float32


def tokens_of_chunk(columns: int) -> int:
    """Tokens that are worked on at a time where nobody says how many: their logits, of so many columns, are at most ELEMENTS."""
    return max(1, ELEMENTS // max(columns, 1))


@dataclass(frozen=True, slots=True)
class Head:
    """What makes logits of hidden states.

    Args:
        weight: [columns, features], this rank's.
        bias: [columns].
        change: from [tokens, columns] and `operands`, what the model's code does to the logits, element by element; None: nothing.
        operands: tensors that this reads.
    """

    weight: Tensor
    bias: Tensor | None
    change: Callable[[Tensor, Sequence[Tensor]], Tensor] | None
    operands: tuple[Tensor, ...]

    def linear(self, hidden: Tensor) -> Tensor:
        """[tokens, columns], as the head computes them."""
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        made = self.linear(hidden)
        return made if self.change is None else self.change(made, self.operands)


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits, or what they are made of.

    Args:
        values: [..., tokens, columns], this rank's; with a head hidden states, [..., tokens, features].
        columns: this rank's.
        split: how the vocabulary is.
    """

    values: Tensor
    columns: int
    split: Split
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class Sums:
    """Of each token, in float32 (float64 for logits in float64).

    Args:
        total: [..., tokens], the logarithm of the sum of the exponentials of all logits.
        chosen: [..., tokens, n], the logits of the ids; 0 for an id that is no token of the vocabulary.
        weighed: [..., tokens], the sum of all logits, each times its weight; zeros without weights.
    """

    total: Tensor
    chosen: Tensor
    weighed: Tensor


def sums_of(rows: Rows, ids: Tensor, weights: Tensor | None = None, chunk: int | None = None) -> Sums:
    """Differentiable in the values, and in the tensors of the head.

    Args:
        ids: [..., tokens, n], of the whole vocabulary.
        weights: [vocabulary], or a scalar for all tokens of the vocabulary.
        chunk: tokens of each sequence that are worked on at a time; None: as many as `tokens_of_chunk` says of all.
    """
    shape, head = ids.shape[:-1], rows.head
    values, flat = rows.values.flatten(0, -2), ids.flatten(0, -2)
    if weights is not None and weights.ndim:
        weights = weights[rows.split.first : rows.split.first + rows.columns]
    tensors = () if head is None else (head.weight, head.bias, *head.operands)
    per_chunk = chunk * math.prod(shape[:-1]) if chunk else tokens_of_chunk(rows.columns)
    total, chosen, weighed = _Sums.apply(values, flat, weights, rows, per_chunk, *tensors)
    return Sums(total.view(shape), chosen.view(ids.shape), weighed.view(shape))


class _Sums(torch.autograd.Function):
    """Saves what the logits are made of, and a number for each token."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, ids: Tensor, weights: Tensor | None, rows: Rows, chunk: int, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = None if rows.head is None else _with(rows.head, tensors)
        column, elsewhere = rows.split.locate(ids, rows.columns)
        pieces = zip(values.split(chunk), column.split(chunk), strict=True)
        found = [_of_piece(*_wide(piece, head), at, weights) for piece, at in pieces]
        own, exponentials, chosen, weighed = (torch.cat(parts) for parts in zip(*found, strict=True))
        maximum = rows.split.reduce(own, "max")
        exponentials = exponentials * (own - maximum).exp()
        addends = [exponentials, chosen.masked_fill(elsewhere, 0.0), *([weighed] if weights is not None else [])]
        summed = rows.split.reduce(torch.cat(addends, -1))
        total, chosen = maximum + summed[:, :1].log(), summed[:, 1 : 1 + ids.shape[1]]
        weighed = summed[:, -1] if weights is not None else torch.zeros_like(total[:, 0])
        ctx.save_for_backward(values, total, column, elsewhere, weights, *tensors)
        ctx.head, ctx.chunk = rows.head, chunk
        return total[:, 0], chosen.contiguous(), weighed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_chosen: Tensor, of_weighed: Tensor) -> tuple[Tensor | None, ...]:
        values, total, column, elsewhere, weights, *tensors = ctx.saved_tensors
        head = None if ctx.head is None else _with(ctx.head, tensors)
        needed = ctx.needs_input_grad
        found = _Gradients(head, values if needed[0] else None, needed[5:])
        of_chosen = of_chosen.masked_fill(elsewhere, 0.0)
        every = (values, total, column, of_total.unsqueeze(-1), of_chosen, of_weighed.unsqueeze(-1))
        pieces = zip(*(part.split(ctx.chunk) for part in every), strict=True)
        for i, (x, t, at, g_total, g_chosen, g_weighed) in enumerate(pieces):

            def gradient(
                wide: Tensor,
                fresh: bool,
                t: Tensor = t,
                at: Tensor = at,
                g_total: Tensor = g_total,
                g_chosen: Tensor = g_chosen,
                g_weighed: Tensor = g_weighed,
            ) -> Tensor:
                made = (wide.sub_(t) if fresh else wide - t).exp_().mul_(g_total)
                if wide.shape[-1]:
                    made.scatter_add_(-1, at, g_chosen)
                return made if weights is None else made.add_(g_weighed * weights.to(made.dtype))

            found.add(i * ctx.chunk, x, gradient)
        return (found.of_values, None, None, None, None, *found.of_tensors())


def _with(head: Head, tensors: Sequence[Tensor | None]) -> Head:
    """The head with these tensors, which autograd knows."""
    weight, bias, *operands = tensors
    assert weight is not None
    return Head(weight, bias, head.change, tuple(x for x in operands if x is not None))


def _accumulating(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(values: Tensor, head: Head | None) -> tuple[Tensor, bool]:
    """Logits in float32 at least, and whether they may be changed."""
    logits = values if head is None else head.logits(values)
    wide = logits.to(_accumulating(logits.dtype))
    return wide, head is not None or wide is not logits


def _of_piece(x: Tensor, fresh: bool, column: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The maximum, the sum of exponentials below it, the logits of the columns, the weighed sum."""
    none = x.new_zeros(len(x), 1)
    if not x.shape[-1]:
        return none - torch.inf, none, x.new_zeros(column.shape), none
    chosen, weighed = x.gather(-1, column), none
    if weights is not None:
        weighed = (x.mv(weights.to(x.dtype)) if weights.ndim else x.sum(-1) * weights).unsqueeze(-1)
    maximum = x.amax(-1, keepdim=True)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    below = x.sub_(shift) if fresh else x - shift
    return maximum, below.exp_().sum(-1, keepdim=True), chosen, weighed


class _Gradients:
    """Those of the values and of the head's tensors, added up chunk by chunk, the latter in float32 at least."""

    def __init__(self, head: Head | None, values: Tensor | None, tensors: Sequence[bool]) -> None:
        self.head, self.of_values = head, None if values is None else torch.empty_like(values)
        self.weight, self.bias, *self.operands = tensors if head is not None else (False, False)
        self.sums: dict[int, Tensor] = {}

    def add(self, start: int, x: Tensor, gradient: Callable[[Tensor, bool], Tensor]) -> None:
        """A chunk of the values from a token on, and from its logits, in float32 at least, their gradient."""
        head, of_x = self.head, None if self.of_values is None else self.of_values.narrow(0, start, len(x))
        if head is None:
            if of_x is not None:
                of_x.copy_(gradient(*_wide(x, None)))
            return
        made = head.linear(x)
        of_operands: list[tuple[int, Tensor]] = []
        if head.change is None:
            of_made = gradient(made.to(_accumulating(made.dtype)), True).to(made.dtype)
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
