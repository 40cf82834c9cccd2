"""transformers' look at every layer's positions for packed sequences, switched off."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from transformers import modeling_flash_attention_utils as flash

_NAME = "_is_packed_sequence"


def patch_is_packed_sequence() -> None:
    """Make transformers' flash attention take every batch for one without packed sequences, in this process.

    With a batch of one row, each layer compares the positions, and the device waits for the answer. The patched function
    looks once, at its first batch of one row, and then says no.

    Raises:
        RuntimeError: this version of transformers has no such function.
    """
    original = getattr(flash, _NAME, None)
    if original is None:
        raise RuntimeError(f"transformers has no modeling_flash_attention_utils.{_NAME}, which was to be patched")
    if isinstance(original, _NeverPacked):
        return
    warnings.warn(
        "patch_is_packed_sequence: from now on flash attention of transformers does not see packed sequences (position_ids "
        "that begin anew within a row) in this process, and would attend across their borders",
        stacklevel=3,
    )
    setattr(flash, _NAME, _NeverPacked(original))


class _NeverPacked:
    """In the place of the function."""

    def __init__(self, original: Callable[[Any, int], Any]):
        self.original = original
        self.looked = False

    def __call__(self, position_ids: Any, batch_size: int) -> bool:
        if not self.looked and position_ids is not None and batch_size == 1:
            self.looked = True
            if bool(self.original(position_ids, batch_size)):
                raise ValueError(
                    "the first batch holds packed sequences, which patch_is_packed_sequence makes invisible to flash "
                    "attention: do not pass it, or unpack them"
                )
        return False
