"""The labels of a rank's own tokens where the sequence is split over cp."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .reduced.model_inputs import IGNORED

SEQUENCE = 1  # the dimension in [batch, sequence, ...]


def check_length(length: int, ranks: int) -> None:
    """Refuse a sequence that cannot be cut into equal parts.

    Raises:
        ValueError: with the length to pad it to.
    """
    if length % ranks:
        padded = -(-length // ranks) * ranks
        raise ValueError(f"the sequence has {length} tokens, which cp={ranks} does not divide: pad it to {padded}")


def own_labels_of(labels: Tensor, ranks: int, rank: int, num_items: Tensor | float | None = None) -> dict[str, Any]:
    """The inputs of a next-token loss over a rank's tokens: its part of the shifted labels, and its share of the count.

    Args:
        labels: [batch, sequence]; `ranks` divides the length.
        num_items: the divisor of the sum over the tokens; None is the number of labels that count.
    """
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    count = (shifted != IGNORED).sum() if num_items is None else num_items
    own = {"labels": labels, "shift_labels": shifted}
    return {
        "num_items_in_batch": count / ranks,
        **{name: x.chunk(ranks, SEQUENCE)[rank].contiguous() for name, x in own.items()},
    }
