"""Cross-entropy on logits that are split over the vocabulary (Megatron-LM's vocabulary-parallel loss, arXiv 1909.08053).

The logits are never gathered: two all-reduces of one number (the maximum) and two numbers (the sum of exponentials,
the target's logit) per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .chunks import chunk_size
from .moves import all_reduce

IGNORE_INDEX = -100


class _VocabularyParallelNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, first_row, mesh, ignore_index):
        x = logits.float()
        maximum = all_reduce(x.amax(-1), mesh, "max")
        exponentials = (x - maximum.unsqueeze(-1)).exp()
        local = target - first_row
        elsewhere = (local < 0) | (local >= x.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        own = (x.gather(-1, local.unsqueeze(-1)).squeeze(-1) - maximum).masked_fill(elsewhere, 0.0)
        total, chosen = all_reduce(torch.stack([exponentials.sum(-1), own]), mesh).unbind(0)
        ignored = target == ignore_index
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, elsewhere, ignored)
        ctx.dtype = logits.dtype
        return (total.log() - chosen).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx, gradient):
        probabilities, local, elsewhere, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0.0)
        result = probabilities * gradient.unsqueeze(-1)
        result.scatter_add_(-1, local.unsqueeze(-1), -gradient.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None


def vocabulary_parallel_nll(logits: DTensor, target: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """The negative log-likelihood of each token, in float32.

    Args:
        logits: [..., vocabulary], a DTensor Shard(-1) on a one-dimensional mesh.
        target: [...], ids of the whole vocabulary; `ignore_index` gives 0.

    Returns:
        [...], a plain tensor, equal on all ranks.

    Raises:
        TypeError: the logits are no DTensor split over the vocabulary.
    """
    if not isinstance(logits, DTensor) or logits.device_mesh.ndim != 1:
        raise TypeError("logits must be a DTensor on a one-dimensional mesh")
    if logits.placements[0] not in (Shard(-1), Shard(logits.ndim - 1)):
        raise TypeError(f"logits must be split over the vocabulary (Shard(-1)), not {logits.placements[0]}")
    mesh = logits.device_mesh
    first_row = mesh.get_local_rank() * chunk_size(logits.shape[-1], mesh.size())
    return _VocabularyParallelNLL.apply(logits.to_local(), target, first_row, mesh, ignore_index)


def causal_lm_loss(
    logits: DTensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss` for logits that are split over the vocabulary.

    Args:
        logits: [batch, sequence, vocabulary], a DTensor Shard(-1).
        labels: [batch, sequence]; shifted here, unless `shift_labels` is given.
        vocab_size: unused; the logits know it.
        num_items_in_batch: what to divide the sum by; None is the number of tokens that count.

    Returns:
        The mean negative log-likelihood, a plain scalar.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    nll = vocabulary_parallel_nll(logits, shift_labels.to(logits.device), ignore_index)
    count = num_items_in_batch if num_items_in_batch is not None else (shift_labels != ignore_index).sum()
    return nll.sum() / count
