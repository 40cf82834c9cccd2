"""Switching off the check for packed sequences that transformers runs in every layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from transformers import modeling_flash_attention_utils as flash

_NAME = "_is_packed_sequence"


def patch_is_packed_sequence() -> None:
    """Make transformers' flash attention assume, in this process, that no batch has packed sequences.

    For a batch of one row, each layer compares the positions, which makes the CPU wait for the device. The patched
    function checks only the first batch of one row, and then returns False.

    Raises:
        RuntimeError: this version of transformers does not have the function.
    """
    original = getattr(flash, _NAME, None)
    if original is None:
        raise RuntimeError(
            f"transformers has no modeling_flash_attention_utils.{_NAME}, which patch_is_packed_sequence replaces"
        )
    if isinstance(original, _NeverPacked):
        return
    warnings.warn(
        "patch_is_packed_sequence: from now on, flash attention of transformers does not detect packed sequences in this process "
        "(position_ids that restart within a row), and would attend across their borders",
        stacklevel=3,
    )
    setattr(flash, _NAME, _NeverPacked(original))


class _NeverPacked:
    """The function's replacement."""

    def __init__(self, original: Callable[[Any, int], Any]):
        self.original = original
        self.looked = False

    def __call__(self, position_ids: Any, batch_size: int) -> bool:
        if not self.looked and position_ids is not None and batch_size == 1:
            self.looked = True
            if bool(self.original(position_ids, batch_size)):
                raise ValueError(
                    "the first batch contains packed sequences, and patch_is_packed_sequence hides them from flash "
                    "attention: remove the patch, or unpack the sequences"
                )
        return False
