"""Context parallelism: the inputs of a model whose sequences are split over the cp axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from shardplan.model.adapters import unwrapped
from shardplan.model.labels_over_cp import SEQUENCE, check_length, own_labels_of
from shardplan.model.model_findings import reason
from shardplan.runtime.apply import Applied, applied
from shardplan.runtime.apply.label_counts import undivided
from shardplan.runtime.parallel.vocabulary_logits import IGNORE_INDEX
from shardplan.runtime.parallel.vocabulary_loss import loss_of_model
from shardplan.runtime.parallel.vocabulary_probabilities import OWN_TOKENS
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.equality import TOLERANCE, relative_error


@contextmanager
def context_parallel(
    model: nn.Module,
    *,
    labels: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    **inputs: Any,
) -> Iterator[dict[str, Any]]:
    """The model's inputs, from a batch that all ranks of the cp axis have whole. Run forward and backward inside the context.

        with context_parallel(model, input_ids=ids, labels=ids) as inputs:
            loss = model(**inputs).loss
            loss.backward()

    The mean of the losses over the cp axis is the loss of the whole batch; the mean of the gradients, which FSDP2 takes, is its gradient. If
    the plan's section `context_parallel` leaves each rank its own tokens, a rank has their logits, and `cp` times its share of the mean loss.
    Labels are shifted before they are cut, so that the last token of a rank predicts the first token of the next rank. They are counted over
    the whole batch. If the section makes the sequence whole after the blocks, or there is no cp axis, all inputs are passed on unchanged.

    Args:
        model: what `apply_plan` returned.
        labels: [batch, sequence].
        num_items_in_batch: the divisor of the sum over the tokens; None: the number of labels that count.
        inputs: all other arguments of the model, whole: the caller never cuts ids, positions or masks.

    Raises:
        ValueError: if labels are cut: cp does not divide the sequence; or the model's `loss_function` was replaced by one that is
            not a mean over next tokens.
    """
    record = applied(model)
    cp = record.mesh.cp
    if num_items_in_batch is not None:
        inputs["num_items_in_batch"] = num_items_in_batch
    if cp is None or not returns_tokens(record.program.resolved.on_cp):
        yield inputs if labels is None else {**inputs, "labels": labels}
        return
    if labels is not None:
        check_length(labels.shape[SEQUENCE], cp.size())
        _refuse_loss(record, labels.device)
        inputs |= own_labels_of(labels, cp.size(), cp.get_local_rank(), num_items_in_batch)
    token = OWN_TOKENS.set(True)
    try:
        yield inputs
    finally:
        OWN_TOKENS.reset(token)


def _refuse_loss(record: Applied, device: torch.device) -> None:
    function = undivided(getattr(unwrapped(record.model), "loss_function", None))
    if function is None or function is loss_of_model or function in LOSS_MAPPING.values():
        return
    if (why := _apart(function, device)) is not None:
        raise ValueError(
            f"labels: {why}: leave labels out, and compute the loss from each rank's logits with `causal_lm_loss(logits, None, "
            "shift_labels=..., num_items_in_batch=...)`"
        )


def _apart(function: Callable[..., Tensor], device: torch.device) -> str | None:
    """Why a replaced loss function is not a mean over next tokens; None if it is one. It is called on a few numbers to find out."""
    labels = torch.tensor([[1, 2, 3, 4, 0, IGNORE_INDEX, IGNORE_INDEX, 1]], device=device)
    logits = torch.arange(8.0 * 5, device=device).sin().view(1, 8, 5)
    try:
        parts = []
        for rank, own_logits in enumerate(logits.chunk(2, SEQUENCE)):
            own = own_labels_of(labels, 2, rank)
            parts.append(function(own_logits, own.pop("labels"), 5, **own))
        error = relative_error(torch.stack(parts).mean(), function(logits, labels, 5))
    except Exception as raised:  # user code may raise anything
        return f"the model's loss_function was replaced, and the new one cannot be called with a rank's labels ({reason(raised)})"
    if error <= TOLERANCE[torch.float32]:
        return None
    return (
        "the model's loss_function was replaced, and the new one does not return a mean over next tokens, by shift_labels and "
        "num_items_in_batch"
    )
