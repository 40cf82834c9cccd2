"""Running something apart from whatever dispatch mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .private import private


@contextmanager
def outside_modes() -> Iterator[None]:
    """Switch off the dispatch modes of the caller (a fake or simulated tensor mode, a default device) while it lasts:
    what is built inside is real, and on the CPU unless it says otherwise."""
    with private("disable_modes")(), torch.device("cpu"):
        yield
