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
        top_k: None or -1 is all.
        top_p: 1.0 is all.
        temperature: what `apply_temperature_scaling` divides logits by.
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
        vocab_parallel_logits: [batch, tokens, vocabulary], a DTensor Shard(-1) on a one-dimensional mesh, or whole; with
            context parallelism a DTensor [Shard(1), Shard(-1)] on a mesh of ("cp", "tp"), and then each rank gets the
            whole result, and the gradient of its own tokens.
        input_ids: [batch, tokens], not shifted; the same on all ranks, or a DTensor.
        seq_index: [tokens], with context parallelism: the position of each token in the sequence, rank after rank.
            None: they are in order.
        chunk_size: tokens that are worked on at a time.
        sampling_params: its top_k and top_p (any object that has them); tokens that are cut off get -inf. Its temperature is not
            applied here: `apply_temperature_scaling` does, before.
        inference_only: nothing is kept for a backward; None: where gradients are off.

    Returns:
        [batch, tokens - 1], float32 (float64 for logits in float64). NaN for a target that is no token of the vocabulary.

    Raises:
        ValueError: a seq_index with logits whose tokens are not split; shapes or parameters that do not fit.
        TypeError: logits that are split otherwise; sampling parameters without these names.
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
