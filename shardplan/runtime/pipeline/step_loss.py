"""The loss of a pipeline step: a sum over tokens, divided by the tokens of the global batch.

Each micro-batch gives its share of one number: S n / T, where S is the sum over its tokens, and T the number of tokens of the
whole batch on all n data-parallel ranks. The factor n is there because data parallelism averages over the ranks. A model's own
additions (a router's loss) are no sums over tokens, and are averaged over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from shardplan.runtime.apply.label_counts import IGNORED, tokens_of
from shardplan.runtime.parallel.vocabulary_loss import loss_of_model

NUMBER = "num_items_in_batch"
NOT_DIVIDED = (
    f"the model's `loss_function` neither divides by `{NUMBER}` nor returns the mean over the tokens that a step counts, so "
    f"micro-batches cannot be weighted: let it return `total / {NUMBER}` where {NUMBER} is given, or pass "
    "PipelineOptions(loss_fn=...) to apply_plan"
)
LossFunction = Callable[[Any, Tensor], Tensor]


class StepLoss:
    """How the last stage computes the loss of a micro-batch in one step.

    Args:
        tokens: of the global batch, a number or a scalar tensor.
        micro_batches: of all calls of the optimizer step.
        replicas: the number of data-parallel ranks.
        function: (logits, labels) -> the sum over the tokens of a micro-batch; None: the model computes its own loss.
        counts_labels: whether `tokens` were counted by `tokens_of`.
    """

    def __init__(
        self,
        tokens: Tensor | int,
        micro_batches: int,
        replicas: int,
        function: LossFunction | None,
        *,
        counts_labels: bool = False,
    ):
        self.counts_labels = counts_labels
        self.tokens, self.micro_batches, self.replicas, self.function = tokens, micro_batches, replicas, function
        self.counted = False

    def of(self, run: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, a scalar.

        Args:
            run: (the arguments of the model's forward) -> its output.
        """
        if self.function is not None:
            labels = inputs.pop("labels", None)
            output = run(inputs)
            logits = output.logits if hasattr(output, "logits") else output
            total = self.function(logits, labels)
            if total.ndim:
                raise ValueError(
                    f"loss_fn must return a scalar, the sum over tokens, not a tensor {tuple(total.shape)}"
                )
            return total * self.replicas / self.tokens
        self.counted = False
        output = run(inputs)
        loss = output.loss
        if not self.counted:
            raise RuntimeError(
                "the model computes its loss without its `loss_function`, so it cannot be divided by the tokens of the global batch: "
                "pass PipelineOptions(loss_fn=...) to apply_plan"
            )
        return loss / self.micro_batches

    @property
    def items(self) -> Tensor | float:
        """The divisor for the model's own loss function: the average number of tokens of a micro-batch."""
        return self.tokens / (self.micro_batches * self.replicas)


def count_by_step(model: nn.Module, current: Callable[[], StepLoss | None], *, shifted: bool) -> None:
    """Make a transformers model divide its sum over tokens by the step's number of tokens: `divided_by_step`."""
    model.loss_function = divided_by_step(model.loss_function, current, shifted=shifted)  # type: ignore[assignment,arg-type]  # torch's types


def divided_by_step(
    own: Callable[..., Tensor], current: Callable[[], StepLoss | None], *, shifted: bool
) -> Callable[..., Tensor]:
    """A transformers model's loss function that divides its sum over tokens by the step's number of tokens.

    A function other than transformers' own is called again with another number, to see whether it divides by it, and whether it counts
    the same tokens as the step. A function that ignores the number must be the mean over these tokens; its result is weighted.

    Args:
        current: the loss of the current step.
        shifted: as for `tokens_of`.
    """
    known = own in (ForCausalLMLoss, loss_of_model)
    mean = False  # whether it ignores the divisor

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal known, mean
        step = current()
        if step is None:
            return own(*args, **kwargs)
        step.counted = True
        items, labels = step.items, kwargs.get("labels", args[1] if len(args) > 1 else None)
        if known and not mean:
            return own(*args, **{**kwargs, NUMBER: items})
        if not isinstance(labels, Tensor):
            raise RuntimeError(NOT_DIVIDED)
        count = int(tokens_of(labels, shifted=shifted))
        loss = own(*args, **{**kwargs, NUMBER: items})
        if not count and not torch.isfinite(loss):  # the mean over no tokens
            return (kwargs["logits"] if "logits" in kwargs else args[0]).sum() * 0
        if count and not known and (one := loss.item()):

            def again(labels: Tensor = labels, **number: Any) -> float:
                rest = {name: value for name, value in kwargs.items() if name not in (NUMBER, "labels")}
                if "labels" in kwargs:
                    return own(*args, labels=labels, **rest, **number).item()
                return own(args[0], labels, *args[2:], **rest, **number).item()

            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                twice: dict[str, Any] = {NUMBER: 2 * items}
                mean, number = again(**twice) == one, signature(own).parameters.get(NUMBER)
                if mean:
                    _check_mean(again, loss, labels, shifted=shifted)
                elif step.counts_labels and (number is None or number.default is not number.empty):
                    _check_count(float(items) * one / again(), count)
            known = True
        return loss * count / items if mean else loss

    loss_function.undivided = own  # type: ignore[attr-defined]
    return loss_function


def _check_mean(run: Callable[..., float], loss: Tensor, labels: Tensor, *, shifted: bool) -> None:
    """Raise RuntimeError unless a loss is the mean over the tokens that a step counts. Compares it with the weighted mean of its two halves.

    Args:
        run: (labels) -> the loss.
    """
    odd = torch.arange(labels.numel(), device=labels.device).view_as(labels) % 2 == 1
    halves = [labels.masked_fill(left, IGNORED) for left in (odd, ~odd)]
    counts = [int(tokens_of(half, shifted=shifted)) for half in halves]
    total = sum(run(labels=half) * count for half, count in zip(halves, counts, strict=True) if count)
    if abs(total / sum(counts) - loss.item()) > abs(loss.item()) * torch.finfo(loss.dtype).eps ** 0.5:
        raise RuntimeError(NOT_DIVIDED)


def _check_count(own: float, steps: float) -> None:
    """Args:
    own: the tokens of a micro-batch, as the loss function counts them.
    steps: the same tokens, as the step counts them.
    """
    if abs(own - steps) > 0.5:
        raise RuntimeError(
            f"the model's `loss_function` counts {own:.0f} tokens where a step counts {steps:.0f}: pass `tokens` to step, the number "
            "for the global batch as the function counts it"
        )


def loss_dtype(received: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype of the last stage's loss, from the dtypes of its inputs: float64 in a float64 model, else float32, the dtype of
    a step's loss."""
    return torch.float64 if torch.float64 in received else torch.float32


def zero_like_loss(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)
