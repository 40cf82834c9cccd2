"""What numbers of a configuration shape: a model is built on the meta device with one number doubled, and what changes is read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardplan.core.tree import full_name
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.offline import offline

from .fields import role
from .pictures import parts
from .scale import hidden_size

Build = Callable[[PreTrainedConfig], nn.Module]  # raises whatever the configuration and the modelling code raise
Shapes = Mapping[str, tuple[int, ...]]
SMALLEST = 96  # smaller numbers are counts, kernels, channels and bins
CHANNELS = 64  # the smallest that is looked at where a model would be too large otherwise


def constructed(
    cls: type[PreTrainedModel], config: PreTrainedConfig, device: str = "meta", seed: int = 0, **options: Any
) -> PreTrainedModel:
    """Build a model from a copy of the configuration; the random state outside stays the same."""
    with offline(), torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(seed)
        return cls._from_config(copy.deepcopy(config), **{"dtype": torch.float32, **options})


def shapes_with(model: nn.Module, number: str) -> Shapes | None:
    """The shapes of parameters and buffers, by name, of a model like this one with one number of its configuration doubled; None
    where it has no such number, or that model cannot be built.

    Args:
        model: a small transformers model.
        number: a number in the part of the configuration that describes the text model.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    text = text_config(model.config)
    name = text.attribute_map.get(number, number)
    if type(vars(text).get(name)) is not int:
        return None
    larger = _times(2, model.config, text, name, partial(constructed, type(model)))
    return None if larger is None else _shapes(larger)


def usual_names(config: PreTrainedConfig, build: Build, admits: Callable[[int], bool]) -> dict[str, str]:
    """Numbers whose names have no role -> the usual name of a number that shapes the same.

    Args:
        config: the model's, or one in which numbers whose names have roles are small.
        build: builds the model on the meta device.
        admits: whether a number is looked at; of a list, each.
    """
    found: dict[str, str] = {}
    base, hidden = None, [hidden_size(part) for part in parts(config)]
    for part in parts(config):
        for name, value in vars(part).items():
            sizes = [*value] if isinstance(value, (list, tuple)) else [value]
            if role(name) is None and sizes and all(type(one) is int and admits(one) for one in sizes):
                base = base or build(config)
                # Code leaves a projection to a width out where it is the hidden size, so twice a number may not be one.
                times = 4 if {2 * one for one in sizes} & {*hidden} else 2
                larger = _times(times, config, part, name, build)
                # Where it is tied to a hidden size it is refused, as the groups of a convolution are, or shapes nothing: it is of a
                # head that this class lacks.
                tied = "intermediate_size" if value in hidden else ""
                usual = tied if larger is None else _usual_name(sizes, base, larger, times) or tied
                found |= {name: usual} if usual else {}
    return found


def with_usual_names(config: PreTrainedConfig, build: Build) -> PreTrainedConfig:
    """A configuration whose numbers have names of their own, with the usual names mapped to them; any other as it is."""
    text = text_config(config)
    if hidden_size(text) is not None or config_value(text, "vocab_size") is not None or _table(build(config)) is None:
        return config
    names = dict(text.attribute_map)
    found = usual_names(config, build, lambda number: number > 1)
    for name, usual in ((name, usual) for name, usual in found.items() if name in vars(text)):
        names[usual if usual not in names else f"{name}_{usual}"] = name
    config = copy.deepcopy(config)
    text_config(config).attribute_map = names
    return config


def _usual_name(sizes: list[int], base: nn.Module, larger: nn.Module, times: int) -> str:
    """The usual name of numbers, from the model and the one that was built with so many times the numbers; empty for any other."""
    table, now = (_table(one) for one in (base, larger))
    if table is not None and now is not None and table.weight.shape != now.weight.shape:
        return "vocab_size" if table.weight.shape[1] == now.weight.shape[1] else "hidden_size"
    before, after = (_shapes(one, whole=False) for one in (base, larger))
    if before.keys() < after.keys():
        return "num_hidden_layers"
    pairs = [pair for name in before.keys() & after.keys() for pair in zip(before[name], after[name], strict=False)]
    multiplied = {dim for dim, new in pairs if new == times * dim}
    half, *more = (one // 2 for one in sizes)
    if not more and any(before[name] == (half,) and after.get(name) == (times * half,) for name in before):
        return "head_dim"  # of the frequencies of a rotary embedding
    if multiplied & {*sizes}:
        stacks = sum(len(shape) == 3 and shape[0] != after.get(name, shape)[0] for name, shape in before.items())
        return "num_experts" if stacks > 1 else "intermediate_size"
    if max(sizes) >= SMALLEST:
        return "intermediate_size" if any(dim % one == 0 for dim in multiplied for one in sizes) else ""
    # Heads that share the hidden size shape nothing, but each becomes narrower.
    narrower = any(n == times * m for n, m in zip(_numbers(base), _numbers(larger), strict=False))
    return "num_key_value_heads" if multiplied else "num_attention_heads" if narrower else ""


def _times(times: int, config: PreTrainedConfig, part: PreTrainedConfig, name: str, build: Build) -> nn.Module | None:
    """The model with a number, or all numbers of a list, in one part of its configuration so many times as large; None where its code
    refuses them, as they are tied to others."""
    larger, value = copy.deepcopy(config), vars(part)[name]
    for one, own in zip(parts(larger), parts(config), strict=True):
        if own is part:
            setattr(one, name, times * value if type(value) is int else [times * item for item in value])
    try:
        return build(larger)
    except Exception:  # raised by the modelling code
        return None


def _table(model: nn.Module) -> nn.Embedding | None:
    """The embedding of tokens; None for a model that has none."""
    try:
        table = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    except NotImplementedError:
        return None
    return table if isinstance(table, nn.Embedding) else None


def _numbers(model: nn.Module) -> list[int]:
    """The numbers that its modules keep."""
    return [n for module in model.modules() for n in vars(module).values() if type(n) is int]


def _shapes(model: nn.Module, *, whole: bool = True) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters and buffers; without the rows of tables and the kernels of convolutions where not `whole`."""
    return {
        full_name(name, own): tuple(tensor.shape)[
            not whole and isinstance(module, nn.Embedding) : None if whole or not hasattr(module, "stride") else 2
        ]
        for name, module in model.named_modules(remove_duplicate=False)
        for own, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
