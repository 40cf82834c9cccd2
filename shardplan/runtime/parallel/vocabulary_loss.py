"""Cross-entropy on logits that may be split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .fused_logits import FusedLogits
from .process_groups import Group
from .vocabulary_cross_entropy import Reduction, cross_entropy_of
from .vocabulary_logits import IGNORE_INDEX, is_split, read_chunk, read_logits
from .vocabulary_probabilities import log_probabilities, refuse_shift_of_chunk
from .vocabulary_sums import Rows


def vocabulary_parallel_nll(logits: DTensor, target: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """The negative log-likelihood of each token, in float32 (float64 for logits in float64).

    Args:
        logits: [..., tokens, vocabulary], a DTensor Shard(-1) on a one-dimensional mesh.
        target: [..., tokens], ids of the whole vocabulary; `ignore_index` gives 0.

    Returns:
        [..., tokens], a plain tensor, equal on all ranks.

    Raises:
        TypeError: the logits are not a DTensor split over the vocabulary. `log_probabilities` also accepts whole logits.
    """
    if not is_split(logits):
        raise TypeError(
            "logits must be a DTensor split over the vocabulary (Shard(-1)); log_probabilities accepts whole ones too"
        )
    return -log_probabilities(logits, target, ignore_index=ignore_index)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    group: Group | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` with ids as targets, for logits that are split over the vocabulary, fused, or whole; in
    float32 (float64 for logits in float64).

    Two all-reduces of one and a few numbers per token, only in forward. Memory besides the logits: a chunk of them in float32, and
    in backward their gradient. Memory besides the hidden states of fused logits: chunks of logits, and the gradients of the hidden
    states and of the head's weight, which is summed in float32.

    Args:
        logits: [..., tokens, vocabulary], as for `log_probabilities`.
        target: [..., tokens], ids of the whole vocabulary.
        weight: [vocabulary], a weight for each token of the vocabulary, as in torch.
        label_smoothing: as in torch, from 0 to 1.
        z_loss: the factor of a term added to each token's loss, the square of the logarithm of the sum of the exponentials (PaLM,
            arXiv 2204.02311: 1e-4).
        chunk_size: tokens of each sequence that are processed at a time; None: a chunk has up to 2**25 logits.
        group, vocab_size: as for `log_probabilities`.

    Returns:
        A plain tensor, equal on all ranks: [..., tokens] for "none", with 0 where the target is ignored; else a scalar: the sum, for
        "mean" divided by the weighted number of tokens that count. NaN for a target outside of the vocabulary.

    Raises:
        TypeError: a DTensor with another split; probabilities as targets.
        ValueError: shapes, sizes or numbers do not fit.
    """
    chunk = read_chunk(chunk_size, 1) if chunk_size is not None else None
    if isinstance(logits, FusedLogits):
        rows = logits.rows()
    else:
        own, split = read_logits(logits, group, vocab_size)
        rows = Rows(own, own.shape[-1], split)
    return cross_entropy_of(rows, target, weight, ignore_index, reduction, label_smoothing, z_loss, chunk)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """transformers' `ForCausalLMLoss` for logits that are split over the vocabulary, fused, or whole.

    Args:
        logits: [batch, sequence, vocabulary], a DTensor Shard(-1), fused, or whole.
        labels: [batch, sequence]; shifted here, unless `shift_labels` is given, [batch, sequence] too.
        vocab_size: the size of the whole vocabulary; if given, plain logits must have this many columns (a DTensor knows it).
        num_items_in_batch: the divisor of the sum; None: the weighted number of tokens that count.
        weight, label_smoothing, z_loss, chunk_size: as for `cross_entropy`.

    Returns:
        The mean negative log-likelihood, a plain scalar.

    Raises:
        ValueError: labels to be shifted inside of `context_parallel`; shapes or numbers do not fit.
    """
    if shift_labels is None:
        if labels is None:
            raise TypeError("causal_lm_loss needs labels or shift_labels")
        refuse_shift_of_chunk("causal_lm_loss(logits, None, shift_labels=inputs['shift_labels'])")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
    expected = None if isinstance(logits, DTensor) else vocab_size
    loss = cross_entropy(
        logits,
        shift_labels.to(logits.device),
        weight,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss=z_loss,
        chunk_size=chunk_size,
        vocab_size=expected,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def loss_of_model(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """`causal_lm_loss` as the `loss_function` of a transformers model, which passes all further arguments of its forward."""
    return causal_lm_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
