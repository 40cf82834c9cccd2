"""The states of the generators of random numbers that a model's code may use."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def generator_states() -> tuple[Any, ...]:
    """The states of torch's generator, that of `random` and, if something imported it, numpy's; two are equal if nothing was drawn
    between them."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    others = (part.tobytes() if hasattr(part, "tobytes") else part for part in state)
    return (bytes(torch.get_rng_state().numpy()), random.getstate(), *others)
