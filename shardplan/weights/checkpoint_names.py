"""The names of a model's tensors in a checkpoint: transformers' renamings and conversions, taken as data.

A conversion stacks, concatenates, splits, transposes or reshapes tensors. It runs on lazy tensors, so its results can
be read in slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from shardplan.core.first_few import in_a_row
from shardplan.model.adapters import adapters_in, unwrapped
from shardplan.runtime.apply.fsdp2 import reshard

from .lazy import Lazy


@dataclass(frozen=True)
class StateEntry:
    """A tensor of a model's state dict.

    Args:
        names: its names there; several where it is tied.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside of data-parallel wrappers."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside of data-parallel wrappers, with its sharded parameters in place.

    Raises:
        ValueError: it has adapters.
    """
    model = without_wrapper(model)
    if unwrapped(model) is not model or next(adapters_in(model), None) is not None:
        raise ValueError(
            "the model has adapters, and a checkpoint of a whole model does not include them: use model.state_dict() and "
            "load_state_dict(), or materialize(model, device, state_dict=...)"
        )
    reshard(model)
    return model


def state_entries(model: nn.Module) -> list[StateEntry]:
    """The parameters and persistent buffers of a model, each once."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and leaf not in module._non_persistent_buffers_set:
                tensors[id(tensor)] = tensor
                names.setdefault(id(tensor), []).append(f"{prefix}.{leaf}" if prefix else leaf)
    return [StateEntry(tuple(dict.fromkeys(names[key])), tensor) for key, tensor in tensors.items()]


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Give modules their original classes back in this context. FSDP2 replaces classes by its own, and conversions are
    found by class names."""
    exchanged: list[tuple[nn.Module, type[nn.Module]]] = [
        (module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)
    ]
    for module, cls in exchanged:
        bases = (base for base in cls.__mro__ if issubclass(base, nn.Module))
        module.__class__ = next(base for base in bases if not issubclass(base, FSDPModule))
    try:
        yield
    finally:
        for module, cls in exchanged:
            module.__class__ = cls


# Loading


@dataclass(frozen=True)
class Resolved:
    """A checkpoint's tensors under a model's names.

    Args:
        tensors: by the model's name.
        unexpected: names of the checkpoint that match nothing in the model.
        conversions: the conversions of transformers that were used.
    """

    tensors: Mapping[str, Lazy]
    unexpected: tuple[str, ...]
    conversions: tuple[Any, ...]


def resolve(model: nn.Module, stored: Mapping[str, Lazy], state: dict[str, Tensor]) -> Resolved:
    """Find the model's tensors among a checkpoint's, as `from_pretrained` does.

    Args:
        stored: the checkpoint's tensors by name.
        state: the model's own tensors by name; a tied tensor is under each of its names.

    Raises:
        ValueError: a conversion fails on the checkpoint's tensors.
    """
    with original_classes(model):
        conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    prefix = getattr(model, "base_model_prefix", "")
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, Lazy] = {}
    unexpected: list[str] = []
    converted: dict[str, tuple[WeightConverter, list[str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            unexpected.append(key)
        elif pattern is None:
            found[name] = stored[key]
        else:
            converter, sources = converted.setdefault(name, (deepcopy(by_pattern[pattern]), []))
            converter.add_tensor(name, key, pattern, stored[key])  # type: ignore[arg-type]  # it accepts tensors too
            sources.append(key)
    for name, (converter, sources) in converted.items():
        made = _convert(converter, name, sources, model)
        found |= {target: tensor for target, tensor in made.items() if target in state}
        unexpected += [target for target in made if target not in state]
    used = tuple(one for one in conversions if one.was_used())
    return Resolved(found, tuple(unexpected), used)


def _convert(converter: WeightConverter, name: str, sources: list[str], model: nn.Module) -> dict[str, Lazy]:
    try:
        made = converter.convert(name, model=model, config=model.config)
    except Exception as error:
        raise ValueError(f"transformers' conversion of {in_a_row(sources, 3)} to {name} fails: {error}") from error
    return {target: tensor[0] if isinstance(tensor, list) else tensor for target, tensor in made.items()}


# Saving


def saved_names(model: nn.Module, tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The tensors of a model under a checkpoint's names and in its layout. As `save_pretrained`, reverts the conversions that
    the model was loaded with, or else those of its type."""
    if not isinstance(model, PreTrainedModel):
        return dict(tensors)
    with original_classes(model), torch.no_grad():
        return revert_weight_conversion(model, dict(tensors))


def kept_name(names: tuple[str, ...], model: nn.Module) -> str:
    """The name under which a tied tensor is saved: the one that transformers does not fill from another name."""
    filled = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in names if name not in filled), names[0])
