"""NeMo-RL's log-probabilities of vocabulary-split logits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.runtime.training import log_probabilities


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


# Log-probabilities of a whole sequence, from logits whose tokens are split over one axis and whose vocabulary is split over another.
TOKENS = 1  # the dim in [batch, tokens, vocabulary]
NONE = -100  # the target that `log_probabilities` leaves out


def _gathered(own: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Join the equally large parts of all ranks along a dim; each rank gets the gradient of its own part."""
    return DTensor.from_local(own, mesh, [Shard(dim)]).full_tensor()


def is_split_twice(logits: Tensor) -> TypeGuard[DTensor]:
    """Whether logits are a DTensor whose tokens are split over one axis and whose vocabulary is split over another."""
    if not isinstance(logits, DTensor) or logits.device_mesh.ndim != 2 or logits.ndim != 3:
        return False
    return set(logits.placements) in ({Shard(TOKENS), Shard(2)}, {Shard(TOKENS), Shard(-1)})


def log_probabilities_of_chunks(
    logits: DTensor, input_ids: Tensor, order: Tensor | None = None, **options: Any
) -> Tensor:
    """The log-probability of each next token of a sequence whose tokens are spread over the ranks.

    Every rank of the tokens' axis gets the result for all tokens, and the gradient of its own. Where FSDP2 averages gradients
    over this axis, multiply the loss by the size of the axis.

    Args:
        logits: [batch, tokens, vocabulary] on a mesh of two named axes: Shard(1) over one, Shard(-1) over the other.
        input_ids: [batch, tokens], not shifted: a DTensor that is split like the logits' tokens, or whole ids in the order of
            the sequence, the same on all ranks.
        order: [tokens], the position of each token in the sequence, rank after rank; None means in order.
        options: temperature, top_k, top_p, chunk_size, as for `log_probabilities`.

    Returns:
        [batch, tokens - 1], in the order of the sequence, a plain tensor, equal on all ranks.

    Raises:
        ValueError: shapes that do not fit; a number of tokens that the axis does not divide.
    """
    tokens, vocabulary = (logits.device_mesh[name] for name in _axes(logits))
    own = logits.to_local()
    length = own.shape[TOKENS] * tokens.size()
    if order is not None and sorted(order.tolist()) != list(range(length)):
        raise ValueError(f"the order must have each of the {length} positions once")
    places = torch.arange(length, device=own.device) if order is None else order.to(own.device).long()
    back = places.argsort()
    if isinstance(input_ids, DTensor):
        ids = input_ids.full_tensor()
        ids = ids[:, back] if input_ids.shape[TOKENS] == length else ids
    else:
        ids = input_ids
    if ids.shape != (own.shape[0], length):
        raise ValueError(f"the ids' shape is {tuple(ids.shape)}, for logits of {(own.shape[0], length)} tokens in all")
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=NONE)
    target = following[:, places].chunk(tokens.size(), TOKENS)[tokens.get_local_rank()]
    logs = log_probabilities(own, target, group=vocabulary, vocab_size=_size(own, vocabulary), **options)
    return _gathered(logs, tokens, TOKENS)[:, back][:, :-1]


def _axes(logits: DTensor) -> tuple[str, str]:
    """The names of the axes that the tokens and the vocabulary are split over."""
    names = logits.device_mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            'the logits\' mesh has no axis names: make the logits on a slice of a named mesh, such as mesh["cp", "tp"]'
        )
    first, second = names
    return (first, second) if logits.placements[0] == Shard(TOKENS) else (second, first)


def _size(own: Tensor, mesh: DeviceMesh) -> int:
    """The size of the whole vocabulary. A DTensor that is made from local parts assumes that all parts are as large as its own."""
    counts = _gathered(torch.tensor([own.shape[-1]], device=own.device), mesh, 0).tolist()
    size = sum(counts)
    chunk = -(-size // mesh.size())
    if counts != [min(chunk, max(0, size - rank * chunk)) for rank in range(mesh.size())]:
        raise ValueError(f"the ranks have {counts} columns of a vocabulary of {size}: it must be split in ceil-chunks")
    return size
