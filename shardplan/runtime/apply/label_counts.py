"""How many labels a loss counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

IGNORED = -100


def tokens_of(labels: Tensor, *, shifted: bool) -> Tensor:
    """The number of labels that count, an int64 scalar.

    Args:
        shifted: whether the loss predicts the next token, so that the first label of a row has none.
    """
    return ((labels[..., 1:] if shifted else labels) != IGNORED).sum()


def predicts_next_token(model: nn.Module) -> bool:
    """Whether a transformers model's own loss predicts the next token."""
    if not isinstance(model, PreTrainedModel):
        return False
    return LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss) is ForCausalLMLoss  # as its `loss_function` is chosen


def undivided(function: Any) -> Any:
    """A model's own loss function, even if a function that divides by the count of a step has replaced it."""
    return getattr(function, "undivided", function)
