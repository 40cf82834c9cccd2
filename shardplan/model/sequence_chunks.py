"""A rank's chunk of a batch that is split along the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .reduced.model_inputs import IGNORED

SEQUENCE = 1  # the dimension in [batch, sequence, ...]


def check_length(length: int, ranks: int) -> None:
    """Refuse a sequence that cannot be cut into equal chunks.

    Raises:
        ValueError: with the length to pad it to.
    """
    if length % ranks:
        padded = -(-length // ranks) * ranks
        raise ValueError(f"the sequence has {length} tokens, which cp={ranks} does not divide: pad it to {padded}")


def own_chunk_of(
    whole: Mapping[str, Tensor], ranks: int, rank: int, num_items: Tensor | float | None = None
) -> dict[str, Any]:
    """The arguments of a model's forward for one chunk, with the positions of its tokens. Labels are shifted before they are cut.

    Args:
        whole: input_ids or inputs_embeds, labels, position_ids: [batch, sequence, ...], of a length that `ranks` divides.
        num_items: what to divide the sum over the tokens by; None is the number of labels that count.

    Raises:
        ValueError: as `check_length`.
    """
    whole = dict(whole)
    first = next(iter(whole.values()))
    length = first.shape[SEQUENCE]
    check_length(length, ranks)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, device=first.device).expand(first.shape[0], length)
    labels = whole.pop("labels", None)
    result = {} if labels is None else own_labels_of(labels, ranks, rank, num_items)
    return result | {name: x.chunk(ranks, SEQUENCE)[rank].contiguous() for name, x in whole.items()}


def own_labels_of(labels: Tensor, ranks: int, rank: int, num_items: Tensor | float | None = None) -> dict[str, Any]:
    """What a loss of next tokens reads of a rank's tokens: labels that were shifted before they were cut, and a share of the count.

    Args:
        labels, num_items: as for `own_chunk_of`.
    """
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    count = (shifted != IGNORED).sum() if num_items is None else num_items
    own = {"labels": labels, "shift_labels": shifted}
    return {
        "num_items_in_batch": count / ranks,
        **{name: x.chunk(ranks, SEQUENCE)[rank].contiguous() for name, x in own.items()},
    }
