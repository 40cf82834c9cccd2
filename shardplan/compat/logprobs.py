"""NeMo-RL's log-probabilities of vocabulary-split logits."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardplan.runtime.training import log_probabilities


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: Tensor,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    inference_only: bool | None = None,
) -> Tensor:
    """The log-probability of each next token: of input_ids[:, 1:] under logits[:, :-1].

    Args:
        vocab_parallel_logits: [batch, tokens, vocabulary], a DTensor Shard(-1) on a one-dimensional mesh, or whole.
        input_ids: [batch, tokens], not shifted; the same on all ranks.
        seq_index: must be None: `shardplan.context_parallel` says which tokens a rank of the cp axis has.
        chunk_size: tokens that are worked on at a time.
        inference_only: nothing is kept for a backward; None: where gradients are off.

    Returns:
        [batch, tokens - 1], float32 (float64 for logits in float64).
    """
    if seq_index is not None:
        raise ValueError(
            "seq_index must be None: take a rank's tokens by shardplan.context_parallel, and their targets with them"
        )
    ids = input_ids.full_tensor() if isinstance(input_ids, DTensor) else input_ids
    with torch.no_grad() if inference_only else nullcontext():
        return log_probabilities(vocab_parallel_logits, ids, shift=True, chunk_size=chunk_size)
