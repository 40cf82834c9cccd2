"""The loss of a pipeline step: a sum over tokens, divided by the tokens of the global batch.

Each micro-batch gives its share of one number: with S the sum over its tokens, T the tokens of the whole batch on all
data-parallel ranks and n of these ranks, S n / T, since data parallelism averages over the ranks. What a model adds to that
by itself (a router's loss) is no sum over tokens; it is averaged over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

IGNORED = -100
LossFunction = Callable[[Any, Tensor], Tensor]


class StepLoss:
    """How the last stage computes the loss of a micro-batch in one step.

    Args:
        tokens: of the global batch, a number or a scalar tensor.
        micro_batches: of all calls that make the step.
        replicas: the number of data-parallel ranks.
        function: (logits, labels) -> the sum over the tokens of a micro-batch; None: the model computes its own loss.
    """

    def __init__(self, tokens: Tensor | int, micro_batches: int, replicas: int, function: LossFunction | None):
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
                "the model computes its loss without its `loss_function`, so that it cannot be divided by the tokens of the "
                "global batch: pass PipelineOptions(loss_fn=...) to apply_plan"
            )
        return loss / self.micro_batches

    @property
    def items(self) -> Tensor | float:
        """What the model's own loss function divides its sum by: the tokens of a micro-batch, on average."""
        return self.tokens / (self.micro_batches * self.replicas)


def count_by_step(model: nn.Module, current: Callable[[], StepLoss | None]) -> None:
    """Make a transformers model divide its sum over tokens by what the step says.

    Args:
        current: the loss of the step that runs.
    """
    own: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        step = current()
        if step is None:
            return own(*args, **kwargs)
        step.counted = True
        return own(*args, **{**kwargs, "num_items_in_batch": step.items})

    model.loss_function = loss_function  # type: ignore[assignment]  # torch's types know tensors and modules alone


def tokens_of(labels: Tensor, *, shifted: bool) -> Tensor:
    """The number of labels that count, an int64 scalar.

    Args:
        shifted: whether the loss predicts the next token, so that the first label of a row has none.
    """
    return ((labels[..., 1:] if shifted else labels) != IGNORED).sum()


def zero_like_loss(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def predicts_next_token(model: nn.Module) -> bool:
    """Whether a transformers model's own loss predicts the next token."""
    if not isinstance(model, PreTrainedModel):
        return False
    return LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss) is ForCausalLMLoss  # as its `loss_function` is chosen
