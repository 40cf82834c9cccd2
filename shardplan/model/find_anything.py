"""Finding a model by whatever names it, in Python or on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .adapters import unwrapped
from .build_tree import tree_of
from .found import FoundModel, Inputs, find_model, found_from_config
from .own_models import find_inputs, find_reduced
from .rebinding import copied


def find_any(
    model: Any,
    *,
    settings: Mapping[str, Any] = {},
    trust_remote_code: bool = False,
    inputs: str | Inputs | None = None,
    reduced: str | Callable[[], nn.Module] | None = None,
) -> FoundModel:
    """The model that a word, a transformers configuration or a module names.

    Args:
        model: as for `shardplan.validate`.
        settings, trust_remote_code: as for `find_model`, where `model` is a word.
        inputs: the inputs of the reduced model: a function or `module:callable`: (seed) -> keyword arguments of
            `forward`. For a transformers model it may accept the reduced configuration as a second argument.
        reduced: builds a reduced model of the same structure: a function without arguments, or `module:callable`.

    Raises:
        PlanError: SP501 to SP510, SP515.
        TypeError: `model` is none of these.
    """
    found = _found(model, settings, trust_remote_code)
    if inputs is not None:
        found = replace(found, inputs=find_inputs(inputs))
    if reduced is not None:
        found = replace(found, reduced=find_reduced(reduced))
    return found


def _found(model: Any, settings: Mapping[str, Any], trust_remote_code: bool) -> FoundModel:
    if isinstance(model, str):
        return find_model(model, trust_remote_code=trust_remote_code, overrides=settings)
    if isinstance(model, PreTrainedConfig):
        return found_from_config(model)
    if isinstance(model, nn.Module):
        return _found_module(model)
    raise TypeError(f"a model is a word, a module or a transformers config, not {type(model).__name__}")


def _found_module(model: nn.Module) -> FoundModel:
    """A FoundModel that builds copies of a module, or of the model inside where peft wraps it."""
    model = unwrapped(model)
    config = getattr(model, "config", None)
    return FoundModel(
        name=type(model).__name__,
        config=config if isinstance(config, PreTrainedConfig) else None,
        tree=tree_of(model),
        builder=lambda device, dtype: _copy(model, device, dtype),
        module=model,
        own_code=True,
    )


def _copy(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """A copy on a device; one on the meta device copies no values, however large the model is."""
    if device != "meta":
        return copied(model).to(device=device, dtype=dtype)
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copied(model, memo)
