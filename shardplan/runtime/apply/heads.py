"""A loss for models whose logits stay split over the vocabulary."""

from __future__ import annotations

from torch import nn

from shardplan.compiler.lower.program import Program
from shardplan.runtime.parallel.vocabulary_loss import loss_of_model


def use_sharded_loss(model: nn.Module, program: Program) -> None:
    """Give a transformers model a loss on split logits, so that `labels=` keeps working. A model without a
    `loss_function` computes its own loss on the DTensor."""
    if program.sharded_logits and hasattr(model, "loss_function"):
        model.loss_function = loss_of_model  # type: ignore[assignment]  # torch's types know tensors and modules alone
