"""Making a transformers configuration object from a configuration file or a model type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardplan.core.diagnostics import Code, PlanError

from .config_files import ConfigFile
from .model_findings import did_you_mean, reason, refuse
from .offline import offline
from .settings import Setting, with_settings

NO_MODEL_TYPE = Code("SP503")
UNKNOWN_TYPE = Code("SP504")
CANNOT_BUILD = Code("SP509")

# The most modules that are made one by one. A configuration with more is a mistake or an attack: building it would
# take hours, though no memory.
MAX_LAYERS = 1_000  # the deepest models on the hub have some 130
MAX_EXPERTS = 1_000_000  # layers x experts
MAX_LABELS = 100_000  # ImageNet-21k has 21,841
LAYERS = re.compile(r"(^|_)(n_?layers?|num_.*layers|layers|depth|num_blocks)$")
DROPOUT = re.compile(r"(dropout|pdrop|layerdrop)(_prob|_rate|_p)?$")
EXPERTS = re.compile(r"(^|_)experts$|^expert_num$")


def config_of_file(file: ConfigFile, settings: Mapping[str, Setting], *, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration in a file, with the user's settings.

    Raises:
        PlanError: SP503, SP504, SP509, SP510.
    """
    model_type = file.data.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise refuse(
            NO_MODEL_TYPE,
            f"{file.shown} has no model_type",
            help="a configuration of diffusers builds no model here: name a function that does, `module:callable`"
            if "_class_name" in file.data
            else 'add the architecture\'s name, as in "model_type": "llama"',
            file=file.shown,
        )
    if model_type not in CONFIG_MAPPING and not file.own_code:
        raise refuse(
            UNKNOWN_TYPE,
            f"transformers does not know the model_type {model_type!r} of {file.shown}",
            help=did_you_mean(model_type, CONFIG_MAPPING) or "install a version of transformers that has it",
            file=file.shown,
        )
    # If the file is a folder's config.json, the folder: the configuration's own code is in it.
    source = file.path.parent if file.path.name == "config.json" else file.path
    trust = bool(file.own_code) and trust_remote_code

    def read() -> PreTrainedConfig:
        return AutoConfig.from_pretrained(str(source), local_files_only=True, trust_remote_code=trust)

    return _checked(read, file.data, settings, file.shown, file.shown)


def config_of_type(model_type: str, settings: Mapping[str, Setting]) -> PreTrainedConfig:
    """The default configuration of a model type, with the user's settings.

    Raises:
        PlanError: SP504, SP509, SP510.
    """
    if model_type not in CONFIG_MAPPING:
        raise refuse(
            UNKNOWN_TYPE,
            f"{model_type!r} is neither a model type of transformers nor `module:callable`",
            help=_meant(model_type),
        )
    return _checked(CONFIG_MAPPING[model_type], {}, settings, model_type, None)


def _meant(word: str) -> str:
    """The word to suggest for one that is not a model type: a folder or Python file in the current folder, else a similar word."""
    folder = f"for a folder in the current directory write ./{word}"
    module = word.removesuffix(".py")
    try:
        is_folder, is_module = Path(word).is_dir(), Path(f"{module}.py").is_file()
    except OSError:  # too long for a name
        return "write a model type of transformers, a folder, or `module:callable`"
    if is_folder:
        return folder
    if is_module:
        return f"write {module}:NAME, where NAME is a function of {module}.py without arguments that returns the model"
    return did_you_mean(word, CONFIG_MAPPING) or folder


def _checked(make: Any, data: Mapping[str, Any], settings: Mapping[str, Setting], shown: str, file: str | None) -> Any:
    for given in (data, settings):
        if (excess := next(_listed(given), None)) is not None:
            raise refuse(CANNOT_BUILD, f"{shown} cannot be built: {excess}", file=file)
    try:
        with offline():
            config = make()
            if settings:
                data = with_settings(data, config, settings, shown)
                config = type(config)(**{**data, "name_or_path": config.name_or_path})
    except PlanError:
        raise
    except Exception as error:  # whatever transformers or the model's own code raises
        raise refuse(
            CANNOT_BUILD,
            f"transformers refuses the configuration of {shown}",
            notes=(reason(error),),
            file=file,
        ) from error
    excess = next(_excess(config), None)
    if excess is not None:
        raise refuse(CANNOT_BUILD, f"{shown} cannot be built: {excess}", file=file)
    return config


def _listed(data: Any) -> Iterator[str]:
    """Each number that is too large to make the configuration, as its class builds lists of that length."""
    for name, value in data.items():
        last = str(name).rpartition(".")[2]
        if isinstance(value, Mapping):
            yield from _listed(value)
        elif isinstance(value, int | float) and LAYERS.search(last) and value > MAX_LAYERS:
            yield f"{name} is {value}, and at most {MAX_LAYERS} layers can be built"
        elif isinstance(value, int | float) and last == "num_labels" and value > MAX_LABELS:
            yield f"{name} is {value}, and at most {MAX_LABELS} labels can be listed"


def _excess(config: PreTrainedConfig) -> Iterator[str]:
    """Each number that is too large or too small to build or run the model, in a configuration and those nested in it."""
    layers, experts = 1, 1
    for size in ("hidden_size", "vocab_size"):
        value = getattr(config, size, None)
        if isinstance(value, int) and value < 1:
            yield f"{config.attribute_map.get(size, size)} is {value}, and must be at least 1"
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _excess(value)
        elif DROPOUT.search(name) and isinstance(value, int | float) and not 0 <= value <= 1:
            yield f"{name} is {value}, and must be a probability, from 0 to 1"  # some classes use it only in a step
        elif isinstance(value, int) and LAYERS.search(name):
            layers = max(layers, value)
            if value < 0:
                yield f"{name} is {value}, and cannot be negative"
            if value > MAX_LAYERS:
                yield f"{name} is {value}, and at most {MAX_LAYERS} layers can be built"
        elif isinstance(value, int) and EXPERTS.search(name):
            experts = max(experts, value)
    if layers * experts > MAX_EXPERTS:
        yield f"it has {layers} layers of {experts} experts, and at most {MAX_EXPERTS} experts can be built"
