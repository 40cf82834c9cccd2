"""Facts about a model type from the source text of transformers. The code is not imported: that would need torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CONVERSIONS = "conversion_mapping.py"  # renamings of checkpoint tensors, by model type and class name
# Code that creates names that the text does not contain, or imports modules from another file.
_ELSEWHERE = re.compile(
    r"add_module\(|register_module\(|setattr\(|ModuleDict\(|OrderedDict|AutoModel|AutoBackbone|timm|nn\.Transformer"
    r"|^from \.\.\w+(\.\w+)* import (?!.*Config\b)",
    re.MULTILINE,
)
# Endings that transformers renames in every checkpoint.
LEGACY = ("gamma", "beta", "weight_g", "weight_v", "parametrizations")


@dataclass(frozen=True, slots=True)
class Source:
    """The source text of a model.

    Args:
        attributes: every name that its modules' code assigns after `self.` -> the position of the first. Apart from list
            indices, modules of the model have no other names.
    """

    attributes: Mapping[str, int]


def source_of(config: Mapping[str, Any]) -> Source | None:
    """The code of a configuration's model, if its modules have the same names as in the model's checkpoints.

    None where this is not certain: transformers renames or joins tensors of this type, or the model has parts of other
    types, code of its own, or generated names.
    """
    listed, model_type = config.get("architectures"), config.get("model_type")
    name = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
    if not isinstance(name, str) or not name.isidentifier() or not name.endswith("ForCausalLM"):
        return None
    if not isinstance(model_type, str) or not model_type.isidentifier() or "auto_map" in config:
        return None
    if "quantization_config" in config or any(isinstance(v, dict) and "model_type" in v for v in config.values()):
        return None
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    try:
        conversions = (package / CONVERSIONS).read_text("utf-8")
        text = (package / "models" / model_type / f"modeling_{model_type}.py").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if any(f'"{word}"' in conversions for word in (model_type, *re.findall(r"^class (\w+)", text, re.MULTILINE))):
        return None
    if f"class {name}(" not in text or _ELSEWHERE.search(text):
        return None
    names = dict.fromkeys(re.findall(r"\bself\.(\w+)", text))
    return Source({name: place for place, name in enumerate(names)})
