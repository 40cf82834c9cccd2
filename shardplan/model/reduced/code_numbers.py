"""Numbers of the rotary position embedding that a model's code has and its configuration leaves out."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedConfig

from .pictures import parts

SECTIONS = "mrope_section"  # the number of frequencies for time, for rows and for columns


def completed(config: PreTrainedConfig, module: nn.Module) -> PreTrainedConfig:
    """A configuration with the default sections of rotary frequencies written out, so that they shrink with the heads.

    Args:
        config: the configuration; it is copied where something is missing.
        module: the model built from it, on any device.
    """
    own = list(parts(config))
    missing = {}
    for part in module.modules():  # rotary embeddings keep the part of the configuration that they are built from
        sections, of = getattr(part, SECTIONS, None), getattr(part, "config", None)
        at = next((i for i, one in enumerate(own) if one is of), None)
        rope = getattr(of, "rope_parameters", None)
        if at is not None and isinstance(sections, list) and isinstance(rope, dict) and SECTIONS not in rope:
            missing[at] = sections
    if not missing:
        return config
    result = copy.deepcopy(config)
    for i, one in enumerate(parts(result)):
        if i in missing:
            one.rope_parameters[SECTIONS] = list(missing[i])
    return result
