"""Cross-entropy on logits that may be split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .vocabulary_logits import is_split
from .vocabulary_probabilities import IGNORE_INDEX, log_probabilities, refuse_shift_of_chunk


def vocabulary_parallel_nll(logits: DTensor, target: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """The negative log-likelihood of each token, in float32 (float64 for logits in float64).

    Args:
        logits: [..., tokens, vocabulary], a DTensor Shard(-1) on a one-dimensional mesh.
        target: [..., tokens], ids of the whole vocabulary; `ignore_index` gives 0.

    Returns:
        [..., tokens], a plain tensor, equal on all ranks.

    Raises:
        TypeError: the logits are no DTensor split over the vocabulary. `log_probabilities` accepts whole ones too.
    """
    if not is_split(logits):
        raise TypeError(
            "logits must be a DTensor split over the vocabulary (Shard(-1)); log_probabilities accepts whole ones too"
        )
    return -log_probabilities(logits, target, ignore_index=ignore_index)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """transformers' `ForCausalLMLoss` for logits that are split over the vocabulary, or whole.

    Args:
        logits: [batch, sequence, vocabulary], a DTensor Shard(-1), or whole.
        labels: [batch, sequence]; shifted here, unless `shift_labels` is given, [batch, sequence] too.
        vocab_size: of the whole vocabulary; where it is given, plain logits must have so many columns (a DTensor knows).
        num_items_in_batch: what to divide the sum by; None is the number of tokens that count.

    Returns:
        The mean negative log-likelihood, a plain scalar.

    Raises:
        ValueError: labels that are to be shifted inside of `context_parallel`; shapes that do not fit.
    """
    if shift_labels is None:
        if labels is None:
            raise TypeError("causal_lm_loss needs labels or shift_labels")
        refuse_shift_of_chunk("causal_lm_loss(logits, None, shift_labels=inputs['shift_labels'])")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    expected = None if isinstance(logits, DTensor) else vocab_size
    nll = -log_probabilities(logits, shift_labels, ignore_index=ignore_index, vocab_size=expected)
    count = num_items_in_batch if num_items_in_batch is not None else (shift_labels != ignore_index).sum()
    return nll.sum() / count


def loss_of_model(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """`causal_lm_loss` as the `loss_function` of a transformers model, which calls it with all further arguments of its forward."""
    return causal_lm_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
