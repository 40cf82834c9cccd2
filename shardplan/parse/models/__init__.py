"""The document as pydantic models: which fields there are and what each may hold.

The JSON Schema is made from them; the texts are what an editor shows. What a style takes is not said here: it
follows from the style records (`options`). What stands in a section is not said here either: its dataclass has it
(`core.sections`).
"""

from .document import Document, PlanDocument
from .rules import RuleOptions
from .sections import SectionModel, glob_lists
from .values import ATTRIBUTE, TAGS, WORD, Strict

__all__ = [
    "ATTRIBUTE",
    "TAGS",
    "WORD",
    "Document",
    "PlanDocument",
    "RuleOptions",
    "SectionModel",
    "Strict",
    "glob_lists",
]
