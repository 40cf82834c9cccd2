"""The tokens that count in a truncated distribution: the k largest logits, or those with most of the probability."""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import chunk_size
from .collectives import all_gather, all_to_all
from .process_groups import Group
from .vocabulary_logits import Split
from .vocabulary_top_k import largest


def least_logits(
    x: Tensor, split: Split, top_k: int | None, top_p: float, temperature: float, chunk: int
) -> Tensor | None:
    """The smallest logit of each token that counts, [..., tokens, 1]; None where all count. It has no gradient.

    Args:
        x: this rank's columns, [..., tokens, columns].
        top_k, top_p: as in `log_probabilities`.

    Raises:
        ValueError: top_k is not a number from 1 to the size of the vocabulary; top_p is not above 0 and at most 1.
    """
    if top_k is not None and not 1 <= top_k <= split.size:
        raise ValueError(f"top_k must be from 1 to the {split.size} tokens of the vocabulary, or None, not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}")
    if top_k is None and top_p == 1:
        return None
    with torch.no_grad():
        parts = [_least_of_piece(piece, split, top_k, top_p, temperature) for piece in x.detach().split(chunk, -2)]
        return torch.cat(parts, -2)


def _least_of_piece(x: Tensor, split: Split, top_k: int | None, top_p: float, temperature: float) -> Tensor:
    if top_p == 1:
        assert top_k is not None  # else all count
        return largest(x, top_k, split)[0][..., -1:]
    tokens = x.flatten(0, -2)
    rows = tokens if split.group is None else _whole_rows(tokens, split.size, split.group)
    values = rows.sort(dim=-1, descending=True).values
    wide = values.to(torch.promote_types(x.dtype, torch.float32)) / temperature
    if top_k is not None:
        wide = wide.masked_fill(values < values[..., top_k - 1 : top_k], -torch.inf)
    probabilities = wide.softmax(-1)
    above = probabilities.cumsum(-1) - probabilities  # of all larger ones
    count = (above < top_p).sum(-1, keepdim=True).clamp_min(1)
    least = values.gather(-1, count - 1)
    if top_k is not None:
        least = least.maximum(values[..., top_k - 1 : top_k])
    if split.group is not None:
        least = all_gather(least, split.group, 0, tokens.shape[0])
    return least.view(*x.shape[:-1], 1)


def _whole_rows(x: Tensor, vocabulary: int, group: Group) -> Tensor:
    """Exchange this rank's columns of all rows for all columns of its share of the rows (ceil-chunks)."""
    ranks = group.size()
    rows, columns = _chunks(x.shape[0], ranks), _chunks(vocabulary, ranks)
    own = rows[group.rank() if isinstance(group, torch.distributed.ProcessGroup) else group.get_local_rank()]
    sent = [count * x.shape[1] for count in rows]
    received = [own * count for count in columns]
    flat = all_to_all(x.reshape(-1), received, sent, group)
    return torch.cat([part.view(own, n) for part, n in zip(flat.split(received), columns, strict=True)], -1)


def _chunks(size: int, ranks: int) -> list[int]:
    chunk = chunk_size(size, ranks)
    return [min(chunk, max(0, size - rank * chunk)) for rank in range(ranks)]
