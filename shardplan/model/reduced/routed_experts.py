"""Weights with which every expert of the reduced model gets tokens, as an expert without tokens would not be proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from shardplan.core.search_bounds import BOUNDS
from shardplan.model.config_numbers import text_config

from .fields import role
from .outcome import loss_of

STEP = 7919  # the step between the seeds that are tried

Maker = Callable[[], nn.Module]


def reaching(make: Callable[[int], Maker], seed: int, inputs: Mapping[str, Any], config: PreTrainedConfig) -> Maker:
    """Of a few makers of random weights, the first with which all experts get tokens, or else the fewest get none; for a
    model without experts, the first.

    Args:
        make: a seed -> a function that builds models with these weights.
        seed: the first to try.
        inputs: keyword arguments of forward.
        config: the reduced model's.
    """
    numbers = vars(text_config(config)).items()
    counts = {value for name, value in numbers if role(name) == "experts" and isinstance(value, int) and value > 1}
    first = make(seed)
    if not counts:
        return first
    best, fewest = first, unreached(first(), inputs, counts)
    for i in range(1, BOUNDS.routing_seeds):
        if not fewest:
            break
        chosen = make(seed + STEP * i)
        missing = unreached(chosen(), inputs, counts)
        if missing < fewest:
            best, fewest = chosen, missing
    return best


def unreached(model: nn.Module, inputs: Mapping[str, Any], counts: set[int]) -> int:
    """The number of experts without a gradient, over all stacks whose length is one of `counts`; 0 for a model that does not run."""
    try:
        with torch.random.fork_rng(devices=[]):
            loss_of(model(**inputs)).backward()
    except Exception:  # raised by the modelling code; the next run of the model reports it
        return 0
    stacks = [p for p in model.parameters() if p.ndim == 3 and p.shape[0] in counts and p.requires_grad]
    return sum(p.shape[0] if p.grad is None else int((p.grad.flatten(1) == 0).all(1).sum()) for p in stacks)
