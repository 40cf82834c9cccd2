"""The inputs of the traced model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardplan.model.found import FoundModel
from shardplan.model.reduced.feeding import given
from shardplan.model.reduced.model_inputs import CHOICES, SPAN, labels_of


def inputs_of(found: FoundModel, model: nn.Module, micro_batch: int, seq_len: int) -> Callable[[], Mapping[str, Any]]:
    """A function that makes keyword arguments of `forward`: token ids [micro_batch, seq_len] (for each choice, where the class compares
    several), and labels where the class has a loss; for a module with inputs of its own, these inputs in their own size."""
    if found.inputs is not None:
        own = found.inputs if found.config is None else given(found.inputs, found.config)
        return lambda: own(0)
    labels = labels_of(type(model)) if isinstance(model, PreTrainedModel) else None
    argument = (
        "input_ids" if isinstance(model, PreTrainedModel) else next(iter(inspect.signature(model.forward).parameters))
    )
    shape = (micro_batch, CHOICES, seq_len) if labels == "choice" else (micro_batch, seq_len)
    shapes = dict.fromkeys(("next", "classes", "spoken"), shape) | dict.fromkeys(("class", "choice"), (micro_batch,))

    def make() -> dict[str, Any]:
        made: dict[str, Any] = {argument: torch.zeros(shape, dtype=torch.long)}
        if labels == "span":
            made |= {name: torch.zeros(micro_batch, dtype=torch.long) for name in SPAN}
        elif labels is not None:
            made["labels"] = torch.zeros(shapes[labels], dtype=torch.long)
        if isinstance(model, PreTrainedModel) and "use_cache" in inspect.signature(model.forward).parameters:
            made["use_cache"] = False
        return made

    return make
