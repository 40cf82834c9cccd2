"""Finding the model that the user named, on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from shardplan.core.diagnostics import Code, Diagnostic, PlanError, Severity
from shardplan.core.tree import ModuleTree

from .adapters import unwrapped
from .build_tree import tree_of
from .config_files import read_cached, read_folder_or_file
from .config_numbers import text_config
from .model_configs import CANNOT_BUILD, config_of_file, config_of_type
from .model_findings import finding, reason, refuse
from .model_words import classify
from .offline import offline
from .own_models import call, find_callable
from .settings import UNKNOWN_SETTING, Setting

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
Builder = Callable[[str, torch.dtype], nn.Module]
Inputs = Callable[[int], Mapping[str, Any]]
NO_SETTINGS: Mapping[str, Setting] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class FoundModel:
    """A model that the user named.

    Args:
        name: what the user wrote.
        config: the transformers configuration that the class is built from, or None for a module without one.
        tree: the model's modules and parameters.
        builder: builds it on a device in a dtype.
        diagnostics: warnings from finding the model.
        module: the user's own module, if the user gave one.
        inputs: the inputs of the reduced model: seed -> keyword arguments of its `forward`.
        reduced: builds a reduced model of the same structure, where the user names one.
        own_code: whether the user's own code built the model, so that it may have more than its class and configuration
            give it.
        meta: the model that `tree` describes, on the meta device: read it, do not change it; None where `module` is set.
    """

    name: str
    config: PreTrainedConfig | None
    tree: ModuleTree
    builder: Builder
    diagnostics: tuple[Diagnostic, ...] = ()
    module: nn.Module | None = None
    inputs: Inputs | None = None
    reduced: Callable[[], nn.Module] | None = None
    own_code: bool = False
    meta: nn.Module | None = None

    @property
    def shrinks(self) -> bool:
        """Whether its reduced model has smaller numbers, which shardplan chooses."""
        return self.config is not None and self.reduced is None

    def build(self, device: str = "meta", dtype: torch.dtype = torch.float32) -> nn.Module:
        """A new model: without memory on the meta device, on other devices with the class's own random
        initialisation.

        A model from `module:callable` keeps the dtypes that the callable gives it.

        Raises:
            PlanError: SP508, SP509.
        """
        model = self.builder(device, dtype)
        if device == "meta" and not all(parameter.is_meta for parameter in model.parameters()):
            model = model.to(device)  # torch.normal(0, std, size) makes its tensor on the CPU whatever the default is
        return model


def find_model(
    word: str, *, trust_remote_code: bool = False, overrides: Mapping[str, Setting] = NO_SETTINGS
) -> FoundModel:
    """Find the model that a word names, and build it on the meta device. This reads no weights and opens no
    connection.

    Args:
        word: a folder or `config.json`, a hub id in the local cache, a model type of transformers,
            `module:callable`.
        trust_remote_code: run the code that a configuration's `auto_map` names.
        overrides: settings of the configuration to change, dotted names for nested ones.

    Raises:
        PlanError: SP501 to SP510.
    """
    kind = classify(word).kind
    if kind == "callable":
        if overrides:
            raise refuse(
                UNKNOWN_SETTING,
                f"{word} is built by its own code, so these settings cannot be changed: {', '.join(overrides)}",
                help="change them in the callable",
            )
        return _from_callable(word)
    if kind == "type":
        return found_from_config(config_of_type(word, overrides), word)
    read = read_cached if kind == "hub" else read_folder_or_file
    file = read(word, trust_remote_code=trust_remote_code)
    config = config_of_file(file, overrides, trust_remote_code=trust_remote_code)
    if file.own_code:
        return _found(word, config, _remote_builder(config, file.shown))
    return found_from_config(config, word, file.shown)


def found_from_config(config: PreTrainedConfig, name: str | None = None, file: str | None = None) -> FoundModel:
    """The model of a configuration object.

    Args:
        config: the configuration; it is copied, not changed.
        name: the name in messages; None is the model type.
        file: the file that the configuration came from, for messages.

    Raises:
        PlanError: SP509.
    """
    name = name or config.model_type
    chosen = model_class(config, file or name, file)

    def build(device: str, dtype: torch.dtype) -> nn.Module:
        own = copy.deepcopy(chosen.config)
        return _guarded(lambda: chosen.cls._from_config(own, dtype=dtype), device, file or name, file)

    return _found(name, chosen.config, build, chosen.diagnostics)


def tree_of_config(config: PreTrainedConfig) -> ModuleTree:
    """The ModuleTree of the model of a configuration object.

    Raises:
        PlanError: SP509.
    """
    return found_from_config(config).tree


def _found(
    name: str, config: PreTrainedConfig | None, builder: Builder, diagnostics: tuple[Diagnostic, ...] = ()
) -> FoundModel:
    model = builder("meta", torch.float32)
    return FoundModel(name, config, tree_of(model), builder, diagnostics, meta=model)


def _from_callable(word: str) -> FoundModel:
    function = find_callable(word)

    def build(device: str, dtype: torch.dtype) -> nn.Module:
        return unwrapped(call(function, word, device))

    model = build("meta", torch.float32)
    config = getattr(model, "config", None)
    config = config if isinstance(config, PreTrainedConfig) else None
    return FoundModel(word, config, tree_of(model), build, own_code=True, meta=model)


def _remote_builder(config: PreTrainedConfig, shown: str) -> Builder:
    """Builds with the class that `auto_map` names, through transformers' own loader of such code."""
    named = getattr(config, "auto_map", None) or {}
    auto = next((auto for auto in AUTO_CLASSES if auto.__name__ in named), AutoModelForCausalLM)

    def build(device: str, dtype: torch.dtype) -> nn.Module:
        own = copy.deepcopy(config)
        return _guarded(lambda: auto.from_config(own, trust_remote_code=True, dtype=dtype), device, shown, shown)

    return build


def _guarded(make: Callable[[], nn.Module], device: str, shown: str, file: str | None) -> nn.Module:
    try:
        with offline(), torch.device(device):
            return make()
    except PlanError:
        raise
    except Exception as error:  # for an impossible configuration, modelling code may raise anything
        raise refuse(CANNOT_BUILD, f"building the model of {shown} fails", notes=(reason(error),), file=file) from error


# The class that a configuration is built with.
UNKNOWN_CLASS = Code("SP513")

MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A class, warnings, and the configuration to give it (the text part of a composite configuration, for a
    text-only class)."""

    cls: type[PreTrainedModel]
    config: PreTrainedConfig
    diagnostics: tuple[Diagnostic, ...] = ()


def model_class(config: PreTrainedConfig, shown: str, file: str | None = None) -> ModelClass:
    """`config.architectures[0]` where transformers has it; else the type's first class of these: with a language-model
    head, with an image-text head, without a head.

    Raises:
        PlanError: SP509 where there is none, or the named class is for another configuration.
    """
    listed = config.architectures
    named = next(iter(listed), None) if isinstance(listed, (list, tuple)) else listed or None
    cls = _named(named)
    if cls is not None:
        if _accepts(cls, config):
            return ModelClass(cls, config)
        text = text_config(config)
        if _accepts(cls, text):
            return ModelClass(cls, text)
        if any(cls in _mapped(mapping, config) for mapping in MAPPINGS):  # one class is for several types
            return ModelClass(cls, config)
        raise refuse(
            CANNOT_BUILD,
            f"{shown} names the architecture {named!r}, but that class is not for the model type {config.model_type}",
            help="correct `architectures` or `model_type`",
            file=file,
        )
    usual = next((cls for mapping in MAPPINGS for cls in _mapped(mapping, config)), None)
    if usual is None:
        raise refuse(CANNOT_BUILD, f"transformers has no model for the model type {config.model_type}", file=file)
    # As AutoModel.from_config does: a text-only class of a composite configuration takes its text part.
    text = text_config(config)
    given = text if not _accepts(usual, config) and _accepts(usual, text) else config
    if named is None:
        return ModelClass(usual, given)
    warning = finding(
        UNKNOWN_CLASS,
        f"{shown} names the architecture {named!r}, but transformers does not have it; {usual.__name__} is used",
        severity=Severity.WARNING,
        help=f'write "architectures": ["{usual.__name__}"], or name a class of transformers',
        file=file,
    )
    return ModelClass(usual, given, (warning,))


def _mapped(mapping: Any, config: PreTrainedConfig) -> tuple[type[PreTrainedModel], ...]:
    """The classes that transformers builds for a configuration's type."""
    found = mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)


def _named(name: object) -> type[PreTrainedModel] | None:
    """The model class of transformers with that name. Transformers' lazy module imports only names
    that it lists."""
    if not isinstance(name, str) or not name.isidentifier():
        return None
    cls = getattr(transformers, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None


def _accepts(cls: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    return cls.config_class is not None and isinstance(config, cls.config_class)
