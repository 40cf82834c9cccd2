"""The document as pydantic models: its fields, and what each may hold.

The JSON Schema is made from them; editors show their texts. What a style accepts is not written here: it follows from
the style records (`options`). Nor are the fields of a section: its dataclass has them (`core.sections`).
"""

from .document import Document, PlanDocument
from .field_values import ATTRIBUTE, TAGS, WORD, Strict
from .rule_models import RuleOptions, ShareOptions
from .section_models import SectionModel, glob_lists

__all__ = [
    "ATTRIBUTE",
    "TAGS",
    "WORD",
    "Document",
    "PlanDocument",
    "RuleOptions",
    "SectionModel",
    "ShareOptions",
    "Strict",
    "glob_lists",
]
