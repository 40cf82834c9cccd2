"""Rows for experts: pairs of a token and one of its experts. A module's own forward takes them as tokens with one expert.

Rows are taken from tokens, and added up to tokens, by a list of distinct slots: token t has the slots t * width to
(t + 1) * width. So sums run over a dense dim in the same order on every run, on CUDA too, unlike a scatter with duplicate indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .expert_calls import ExpertCall
from .second_derivatives import refuse_second_derivatives


def add_up(rows: Tensor, slots: Tensor, tokens: int, width: int) -> Tensor:
    """The sums of the rows of each token.

    Args:
        rows: [R, ...].
        slots: the slot of each row, [R], below tokens * width; all different.
        tokens: their number T.
        width: the number of slots per token.

    Returns:
        [T, ...]; zeros for a token without rows.
    """
    dense = rows.new_zeros((tokens * width, *rows.shape[1:])).index_copy(0, slots, rows)
    return dense.view(tokens, width, *rows.shape[1:]).sum(1)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.shape = (tokens.shape[0], width)
        return tokens.index_select(0, slots.div(width, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        (slots,) = ctx.saved_tensors
        return add_up(gradient, slots, *ctx.shape), None, None


def take(tokens: Tensor, slots: Tensor, width: int) -> Tensor:
    """The rows of the slots: the transpose of `add_up`.

    Args:
        tokens: [T, ...].
        slots: [R], below T * width; all different.
        width: the number of slots per token.
    """
    return _Take.apply(tokens, slots, width)


class _Unread(torch.autograd.Function):
    """A result without rows. Its backward sends zeros to all inputs that a result with rows would have. So every rank runs the
    collectives of backward, and FSDP2 gets the gradients that it waits for."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *others: Tensor) -> Tensor:
        # It saves no tensors: a parameter's storage may be freed before backward, and zeros need only its shape.
        ctx.like = [x.detach() for x in (rows, *others)]
        return torch.zeros_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        pairs = zip(ctx.needs_input_grad, ctx.like, strict=True)
        return tuple(torch.zeros_like(x) if needed else None for needed, x in pairs)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Calls the module's own forward on rows for this rank's experts.

    Args:
        forward: the module's; it finds the parameters of these experts in the module.
        module: the module.
        call: the call of the module.
        count: the number of all experts.
        local: the number of this rank's experts.
    """

    forward: Callable[..., Any]
    module: nn.Module
    call: ExpertCall
    count: int
    local: int

    def __call__(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts' results for the rows; without rows the module does not run.

        Args:
            rows: [R, H].
            ids: the expert of each, [R], from 0 for this rank's first.
            weights: [R].

        Raises:
            ValueError: the result's shape differs from the rows'; or the module's `num_experts` is not the plan's number.
        """
        if not rows.shape[0]:
            return _Unread.apply(rows, weights, *(p for p in _parameters(self.module) if p.requires_grad))
        ids = ids.to(self.call.ids.dtype)
        args, kwargs = self.call.with_rows(rows, ids.unsqueeze(1), weights.unsqueeze(1))
        with self._counted():
            result = self.forward(*args, **kwargs)
        wanted = (*(1,) * (len(self.call.shape) - 2), *rows.shape)
        if not isinstance(result, Tensor) or result.shape != wanted or result.dtype != rows.dtype:
            raise ValueError(
                f"distributed experts must return a tensor like the tokens, {_words(rows)}, but {self.call.module} returns {_words(result)}"
            )
        return result.reshape(rows.shape)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Set `num_experts`, which most classes of experts read, to this rank's number."""
        attributes = self.module.__dict__
        before = attributes.get("num_experts")
        if type(before) is not int:
            yield
            return
        if before not in (self.count, self.local):
            raise ValueError(f"{self.call.module} has num_experts={before}, but its plan is for {self.count} experts")
        try:
            attributes["num_experts"] = self.local
            yield
        finally:
            attributes["num_experts"] = before


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    """The parameters as the module's forward finds them; they may be plain tensors."""
    for owner in module.modules():
        yield from (p for p in owner._parameters.values() if p is not None)


def _words(result: Any) -> str:
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}"
    return f"{list(result.shape)} in {str(result.dtype).removeprefix('torch.')}"


def sum_of_own(run: OwnRows, tokens: Tensor, ids: Tensor, weights: Tensor, pairs: int) -> Tensor:
    """The contribution of this rank's experts to each token.

    Args:
        run: the module's forward.
        tokens: [T, H].
        ids: [T, k], from 0 for this rank's first expert; others are below 0 or not below `run.local`.
        weights: [T, k].
        pairs: how many of the ids are this rank's.

    Returns:
        [T, H].
    """
    width = ids.shape[1]
    own = ids.reshape(-1)
    own = own.where((own >= 0) & (own < run.local), run.local)
    slots = own.argsort(stable=True)[:pairs]  # by expert, then by token
    rows = run(take(tokens, slots, width), own[slots], take(weights.reshape(-1), slots, 1))
    return add_up(rows, slots, tokens.shape[0], width)
