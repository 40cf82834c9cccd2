"""The configuration numbers on which a model's parameter shapes depend, found by building the model with another number."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from .config_numbers import text_config
from .offline import offline

Shapes = Mapping[str, tuple[int, ...]]


def shapes_with(model: nn.Module, number: str) -> Shapes | None:
    """The parameter shapes, by name, of a model like this one with one number of its configuration doubled; None where
    it has no such number, or that model cannot be built.

    Args:
        model: a small transformers model.
        number: a number in the part of the configuration that describes the text model.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    config = copy.deepcopy(model.config)
    text = text_config(config)
    name = getattr(text, "attribute_map", {}).get(number, number)
    value = vars(text).get(name)
    if type(value) is not int:
        return None
    try:
        setattr(text, name, 2 * value)
        with offline(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            other = type(model)._from_config(config)
    except Exception:  # raised by the model's own code: the numbers do not fit together
        return None
    return {name: tuple(parameter.shape) for name, parameter in other.named_parameters(remove_duplicate=False)}
