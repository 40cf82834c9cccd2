"""Padding batches to a length that tp divides, as sequence parallelism needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# The fill value by the name of the model's argument. `input_ids` gets the padding token. `position_ids` count on: a restart would look
# like the start of another packed sequence.
FILL = {"labels": -100, "attention_mask": 0, "token_type_ids": 0, "inputs_embeds": 0, "mm_token_type_ids": 0}


def pad_to_multiple(
    batch: Mapping[str, Any], multiple: int, *, pad_token_id: int, fill: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Pad the sequences of a batch at their end to a length that `multiple` divides. Labels are -100 there and the mask is
    0, so the loss, a mean over labels, does not change.

    Args:
        batch: keyword arguments of the model: input_ids, labels, attention_mask, position_ids, token_type_ids [batch,
            sequence], inputs_embeds [batch, sequence, hidden]; other values stay as they are. A batch without an
            attention_mask gets none: causal attention does not look ahead.
        multiple: must divide the length: the size of the tp axis.
        pad_token_id: fills input_ids.
        fill: argument -> value, for further arguments of [batch, sequence, ...], or instead of the default values.

    Returns:
        A new batch; tensors that need no padding are the same objects.

    Raises:
        ValueError: sequences of several lengths; no known argument; a multiple below 1.
    """
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}, and must be at least 1")
    fills = {"input_ids": pad_token_id, "position_ids": None, **FILL, **(fill or {})}
    known = {name: value for name, value in batch.items() if name in fills and isinstance(value, Tensor)}
    lengths = {name: value.shape[1] for name, value in known.items() if value.dim() >= 2}
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the sequences need one common length: {listed or 'there are none'}")
    more = -next(iter(lengths.values())) % multiple
    if not more:
        return dict(batch)
    return {**batch, **{name: _padded(known[name], more, fills[name]) for name in lengths}}


def _padded(value: Tensor, more: int, fill: float | None) -> Tensor:
    if fill is None:
        steps = torch.arange(1, more + 1, device=value.device, dtype=value.dtype)
        return torch.cat([value, value[:, -1:] + steps], dim=1)
    return pad(value, (*(0, 0) * (value.dim() - 2), 0, more), value=fill)
