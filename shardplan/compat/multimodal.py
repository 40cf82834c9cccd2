"""NeMo Automodel's settings for models with several modalities, and the parts of such models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from .policies import check_names

FrozenSharding = Literal["root", "per_layer", "replicate"]
Scope = Literal["all", "language", "vision", "audio"]
_MODALITIES = {"vision": "image", "audio": "audio"}  # the words of transformers' `get_encoder`
_T = TypeVar("_T")


@dataclass
class CpVisionFrameShardingConfig:
    """Distributing a vision tower's frames over context-parallel ranks, which shardplan does not do."""

    enabled: bool = False


@dataclass
class MultimodalVisionConfig:
    frame_sharding: CpVisionFrameShardingConfig = field(default_factory=CpVisionFrameShardingConfig)

    def __post_init__(self) -> None:
        self.frame_sharding = _read(
            self.frame_sharding, CpVisionFrameShardingConfig, "multimodal.vision.frame_sharding"
        )


@dataclass
class MultimodalDistributedConfig:
    """Policies for the towers of a model.

    Args:
        frozen_sharding: "replicate" stores frozen parameters whole on every rank (`data_parallel.frozen: replicated`); with "root"
            and "per_layer", the plan decides.
        vision: its `frame_sharding.enabled` must be False.
    """

    frozen_sharding: FrozenSharding = "root"
    vision: MultimodalVisionConfig = field(default_factory=MultimodalVisionConfig)

    def __post_init__(self) -> None:
        self.vision = _read(self.vision, MultimodalVisionConfig, "multimodal.vision")
        check_frozen(self.frozen_sharding, "multimodal.frozen_sharding")
        if self.vision.frame_sharding.enabled is not False:
            raise ValueError(
                "multimodal.vision.frame_sharding.enabled must be False: a vision tower runs on all its frames on every "
                "context-parallel rank"
            )


def check_frozen(value: object, what: str) -> None:
    """Raise ValueError unless the value is a word for frozen towers."""
    if value not in get_args(FrozenSharding):
        raise ValueError(f'{what} must be "root", "per_layer" or "replicate", not {value!r}')


def read_multimodal(value: Any) -> MultimodalDistributedConfig:
    """The policies, given as such or as a mapping; None is the default.

    Raises:
        ValueError: an unknown field, or a value that is not valid. TypeError: something else.
    """
    return _read(MultimodalDistributedConfig() if value is None else value, MultimodalDistributedConfig, "multimodal")


def _read(value: Any, kind: type[_T], what: str) -> _T:
    if isinstance(value, Mapping):
        check_names(value, [one.name for one in fields(kind)], what)  # type: ignore[arg-type]  # a dataclass
        return kind(**value)
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__} or a mapping, not {value!r}")
    return value


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside peft's wrapper; the model itself where it has none."""
    inner = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    return model if inner is None else inner()


def parts_of(model: nn.Module) -> dict[str, str]:
    """The names of a model's parts: "vision" and "audio", where transformers' `get_encoder` finds them, and "language": the
    decoder where the model has one of the former, else the whole model ("")."""
    model = unwrapped(model)
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for part, modality in _MODALITIES.items():
        encoder = getattr(model, "get_encoder", lambda modality: None)(modality=modality)
        name = names.get(id(encoder), "")
        if name and encoder is not getattr(model, "base_model", None):
            found[part] = name
    decoder = getattr(model, "get_decoder", lambda: None)() if found else None
    return {**found, "language": names.get(id(decoder), "")}


def check_scope(scope: Any) -> tuple[Scope, ...]:
    """The words of a scope; ("all",) for None.

    Raises:
        ValueError: a word that is not a scope.
    """
    words = ("all",) if scope is None else (scope,) if isinstance(scope, str) else tuple(scope)
    for word in words:
        if word not in get_args(Scope):
            raise ValueError(
                f'activation_checkpointing_scope must be "all", "language", "vision", "audio" or a list of them, not {scope!r}'
            )
    if not words:
        raise ValueError("activation_checkpointing_scope is empty: switch activation_checkpointing off instead")
    return words


def layers_of(model: nn.Module, scope: tuple[Scope, ...]) -> list[str] | None:
    """The globs of the layers of some parts; None for all parts, for which the plan's own globs are used.

    Raises:
        ValueError: a part that the model does not have, or that has no layers.
    """
    if "all" in scope:
        return None
    parts, inner = parts_of(model), unwrapped(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")
    globs: list[str] = []
    for part in dict.fromkeys(scope):
        if part not in parts:
            raise ValueError(f"activation_checkpointing_scope: the model has no part {part!r}, only {', '.join(parts)}")
        others = [name for other, name in parts.items() if other != part and name]
        lists = [
            name for name in lists_in(inner, parts[part]) if not any(f"{name}.".startswith(f"{o}.") for o in others)
        ]
        if not lists:
            raise ValueError(f"activation_checkpointing_scope: the part {part!r} ({parts[part]}) has no list of layers")
        globs += [f"{prefix}{name}.*" for name in lists]
    return globs


def lists_in(model: nn.Module, name: str) -> Iterator[str]:
    """The outermost lists of modules inside a module."""
    found: list[str] = []
    for inner, module in model.named_modules():
        inside = not name or inner == name or inner.startswith(f"{name}.")
        if inside and isinstance(module, nn.ModuleList) and not any(inner.startswith(f"{other}.") for other in found):
            found.append(inner)
            yield inner


def frozen_towers(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The modules among these that are in a vision or audio tower and have only frozen parameters."""
    parts = parts_of(model)
    towers = [name for part, name in parts.items() if part != "language" and name]
    return [
        name
        for name in names
        if any(f"{name}.".startswith(f"{tower}.") for tower in towers)
        and not any(parameter.requires_grad for parameter in model.get_submodule(name).parameters())
    ]
