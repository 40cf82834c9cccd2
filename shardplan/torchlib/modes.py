"""Running something apart from whatever dispatch mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .private import private


@contextmanager
def outside_modes() -> Iterator[None]:
    """Switch off the dispatch modes of the caller (a fake or simulated tensor mode, a default device) while it lasts:
    what is built inside is real, and on the CPU unless it says otherwise."""
    # A device as context looks at every torch call: without need, a third of the time of the layout check.
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with private("disable_modes")(), on_cpu:
        yield
