"""The document as pydantic models: which fields there are and what each may hold.

The JSON Schema is made from them; the texts are what an editor shows. What a style takes is not said here: it
follows from the style records (`options`).
"""

from .data_parallel import DataParallelFields, DDPFields, MegatronFSDPFields, MixedPrecisionFields
from .document import PlanDocument
from .modules import ActivationCheckpointingFields, CompileFields
from .rules import RuleOptions
from .values import ATTRIBUTE, TAGS, WORD

__all__ = [
    "ATTRIBUTE",
    "TAGS",
    "WORD",
    "ActivationCheckpointingFields",
    "CompileFields",
    "DDPFields",
    "DataParallelFields",
    "MegatronFSDPFields",
    "MixedPrecisionFields",
    "PlanDocument",
    "RuleOptions",
]
