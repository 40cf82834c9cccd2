"""The class that a configuration is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from shardplan.core.diagnostics import Code, Diagnostic, Severity

from .config_numbers import text_config
from .model_configs import CANNOT_BUILD
from .model_findings import finding, refuse

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
