"""The adapters of a reduced model: they have a small rank, and are on the layers whose originals have adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import nn

from shardplan.model.adapters import adapters_in, unwrapped

from .weights import without_noise

SMALLEST = 2  # rank of an adapter; each next larger rank in the original becomes one more


@dataclass(frozen=True, slots=True)
class Adapted:
    """One adapter of one layer.

    Args:
        rank, scaling: those of the layer.
        variant: the class that computes the adapter, where it does not use LoRA's own formula.
    """

    rank: int
    scaling: float
    variant: str | None


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Args:
        configs: the adapter's name -> peft's configuration.
        active: the names of the adapters that run.
        layers: layer, by the name that rules match -> adapter -> its settings there.
        trained: parameter, by the name that rules match -> whether it is trained.
    """

    configs: Mapping[str, Any]
    active: tuple[str, ...]
    layers: Mapping[str, Mapping[str, Adapted]]
    trained: Mapping[str, bool]


def adapters_of(model: nn.Module) -> Adapters | None:
    """The adapters that peft put into a model; None for a model without adapters."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return None
    layers = {name: dict(_adapted(wrapper)) for name, wrapper in adapters_in(model)}
    wrappers: list[Any] = [wrapper for _, wrapper in adapters_in(model)]  # layers of peft, of several classes
    active = tuple(wrappers[0].active_adapters) if wrappers else tuple(configs)
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    return Adapters(dict(configs), active, layers, trained)


def _adapted(wrapper: Any) -> Iterator[tuple[str, Adapted]]:
    variants = getattr(wrapper, "lora_variant", {})
    for name, rank in getattr(wrapper, "r", {}).items():
        variant = type(variants[name]).__name__ if name in variants else None
        yield name, Adapted(rank, wrapper.scaling[name], variant)


def reduced_rank(adapters: Adapters, rank: int) -> int:
    """A small rank: the ranks keep their order, and equal ranks stay equal."""
    ranks = sorted({one.rank for layer in adapters.layers.values() for one in layer.values()})
    return min(rank, SMALLEST + ranks.index(rank))


def adapt(model: nn.Module, adapters: Adapters, original: Callable[[str], str]) -> nn.Module:
    """Put small adapters into a reduced model, and freeze what is frozen in the original.

    Args:
        model: changed in place.
        original: the name that a module or parameter of the reduced model has in the original.

    Raises:
        ValueError: peft creates other adapters than the original's.
        Exception: whatever peft raises.
    """
    # The original has adapters of peft, so peft is installed.
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    names = [name for name, _ in model.named_modules()]
    wanted = {name: adapters.layers[original(name)] for name in names if original(name) in adapters.layers}
    wrapped: PeftModel | None = None
    with torch.random.fork_rng(devices=[]):
        for adapter, config in adapters.configs.items():
            reduced = _config(config, adapter, wanted, adapters)
            if wrapped is None:
                wrapped = PeftModel(model, reduced, adapter_name=adapter, autocast_adapter_dtype=False)
            else:
                wrapped.add_adapter(adapter, reduced, autocast_adapter_dtype=False)
    assert wrapped is not None
    assert isinstance(wrapped.base_model, BaseTuner)
    wrapped.base_model.set_adapter(list(adapters.active))
    result = unwrapped(wrapped)
    without_noise(result)  # afterwards, so that dropout modules exist: peft makes none for the probability 0
    made = {name: {a: one.variant for a, one in _adapted(wrapper)} for name, wrapper in adapters_in(result)}
    if made != {name: {a: one.variant for a, one in layer.items()} for name, layer in wanted.items()}:
        raise ValueError("peft puts adapters into the reduced model that differ from the original's")
    for name, parameter in result.named_parameters():
        parameter.requires_grad_(adapters.trained[original(name)])
    return result


def _config(config: Any, adapter: str, wanted: Mapping[str, Mapping[str, Adapted]], adapters: Adapters) -> Any:
    """peft's configuration of one adapter for exactly these layers; weights that would begin with zeros are random."""
    own = {name: layer[adapter] for name, layer in wanted.items() if adapter in layer}
    ranks = {name: reduced_rank(adapters, one.rank) for name, one in own.items()}
    root = (lambda rank: sqrt(rank)) if config.use_rslora else (lambda rank: rank)
    reduced = copy.deepcopy(config)
    reduced.target_modules = set(own)
    reduced.exclude_modules = reduced.layers_to_transform = reduced.layers_pattern = None
    reduced.rank_pattern = ranks
    reduced.alpha_pattern = {name: own[name].scaling * root(rank) for name, rank in ranks.items()}
    reduced.init_lora_weights = False
    reduced.inference_mode = False
    return reduced
