"""NeMo-RL's log-probabilities of vocabulary-split logits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardplan.runtime.training import log_probabilities

from .split_tokens import is_split_twice, log_probabilities_of_chunks


@dataclass
class TrainingSamplingParams:
    """How tokens were sampled.

    Args:
        top_k: None or -1 keeps all tokens.
        top_p: 1.0 keeps all tokens.
        temperature: `apply_temperature_scaling` divides logits by it.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def apply_temperature_scaling(logits: Tensor, sampling_params: TrainingSamplingParams | None) -> Tensor:
    """Logits, split or whole, divided by the temperature in place."""
    if sampling_params is not None and sampling_params.temperature != 1.0:
        logits.div_(sampling_params.temperature)
    return logits


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: Tensor,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: TrainingSamplingParams | None = None,
    *,
    inference_only: bool | None = None,
) -> Tensor:
    """The log-probability of each next token: input_ids[:, 1:] under logits[:, :-1].

    Args:
        vocab_parallel_logits: [batch, tokens, vocabulary], whole or a DTensor with Shard(-1) on a one-dimensional mesh. With
            context parallelism, a DTensor with [Shard(1), Shard(-1)] on a mesh of ("cp", "tp"): each rank then gets the
            whole result, and the gradient of its own tokens.
        input_ids: [batch, tokens], not shifted; the same on all ranks, or a DTensor.
        seq_index: [tokens], for context parallelism: the position of each token in the sequence, rank after rank.
            None means that the tokens are in order.
        chunk_size: the number of tokens that are worked on at a time.
        sampling_params: an object with top_k and top_p; tokens that they cut off get -inf. The temperature is not applied
            here: call `apply_temperature_scaling` before.
        inference_only: keep nothing for a backward; None: only where gradients are off.

    Returns:
        [batch, tokens - 1], float32 (float64 for logits in float64). NaN for a target that is not in the vocabulary.

    Raises:
        ValueError: a seq_index with logits whose tokens are not split; shapes or parameters that do not fit.
        TypeError: logits that are split in another way; sampling parameters without these names.
    """
    options: dict[str, Any] = {"chunk_size": chunk_size, **_filter(sampling_params)}
    with torch.no_grad() if inference_only else nullcontext():
        if is_split_twice(vocab_parallel_logits):
            return log_probabilities_of_chunks(vocab_parallel_logits, input_ids, seq_index, **options)
        if seq_index is not None:
            raise ValueError(
                "seq_index is for logits whose tokens are split: DTensor.from_local(logits.to_local(), "
                'mesh["cp", "tp"], [Shard(1), Shard(-1)])'
            )
        ids = input_ids.full_tensor() if isinstance(input_ids, DTensor) else input_ids
        return log_probabilities(vocab_parallel_logits, ids, shift=True, **options)


def _filter(sampling_params: TrainingSamplingParams | None) -> dict[str, Any]:
    if sampling_params is None:
        return {}
    if not (hasattr(sampling_params, "top_k") and hasattr(sampling_params, "top_p")):
        raise TypeError(
            f"sampling_params must have top_k and top_p, as TrainingSamplingParams, not {sampling_params!r} "
            "(inference_only is given by keyword)"
        )
    top_k, top_p = sampling_params.top_k, sampling_params.top_p
    return {"top_k": None if top_k == -1 else top_k, "top_p": 1.0 if top_p is None else top_p}
