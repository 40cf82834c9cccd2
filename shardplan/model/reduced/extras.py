"""Arguments in addition to text, for parts of a model that text alone does not reach: encoder states for
cross-attention, and token types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardplan.model.config_numbers import config_value, text_config

from .outcome import loss_of
from .pictures import BATCH, squares
from .scale import hidden_size

Extra = Callable[[Tensor, int], Any]  # (input_ids [batch, sequence], seed) -> the argument
WIDTHS = ("cross_attention_hidden_size", "encoder_hidden_size", "d_model", "hidden_size")


def extras_of(model: nn.Module, config: PreTrainedConfig, inputs: Mapping[str, Any]) -> tuple[dict[str, Extra], bool]:
    """The arguments that give a gradient to parameters that text alone does not reach, by name; and whether the model runs with
    one of them only, as where it drops the positions of a picture from its logits.

    Args:
        model: the reduced model; it is called.
        config: its configuration.
        inputs: text.
    """
    taken = inspect.signature(type(model).forward).parameters
    candidates = [(name, extra) for name, extra in _candidates(config) if name in taken]
    pictures = config_value(config, "vision_config") is not None and "pixel_values" in taken
    if not candidates and not pictures:
        return {}, False
    missing = _unreached(model, inputs)
    if missing is None and pictures:
        pixels = partial(_pixels, config=config)
        runs = _unreached(model, {**inputs, "pixel_values": pixels(inputs["input_ids"], 0)}) is not None
        return ({"pixel_values": pixels}, True) if runs else ({}, False)
    found: dict[str, Extra] = {}
    for name, extra in candidates if missing else ():
        if name in found:
            continue
        left = _unreached(model, {**inputs, name: extra(inputs["input_ids"][:BATCH], 0)})
        if left is not None and missing and missing - left:
            found[name], missing = extra, missing & left
    return found, False


def _candidates(config: PreTrainedConfig) -> Iterator[tuple[str, Extra]]:
    text = text_config(config)
    widths = [config_value(text, name) for name in WIDTHS] + [hidden_size(text)]
    for width in dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0):
        yield "encoder_hidden_states", partial(_states, width=width)
        yield "encoder_outputs", partial(_outputs, width=width)
    yield "token_type_ids", _types


def _states(ids: Tensor, seed: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*ids.shape, width, generator=generator)


def _outputs(ids: Tensor, seed: int, width: int) -> tuple[Tensor]:
    return (_states(ids, seed, width),)


def _pixels(ids: Tensor, seed: int, config: PreTrainedConfig) -> Tensor:
    """A picture for each row, which no token stands for."""
    return squares(config, seed)


def _types(ids: Tensor, seed: int) -> Tensor:
    """Token types: the first part of each row has one type, the rest another."""
    return (torch.arange(ids.shape[1]) >= ids.shape[1] // 3).long().expand_as(ids).contiguous()


def _unreached(model: nn.Module, inputs: Mapping[str, Any]) -> set[str] | None:
    """The trained parameters without a gradient; None where the model does not run."""
    try:
        with torch.random.fork_rng(devices=[]):
            loss_of(model(**inputs)).backward()
        return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    except Exception:  # of the modelling code: the next run of the model reports it
        return None
    finally:
        model.zero_grad(set_to_none=True)
