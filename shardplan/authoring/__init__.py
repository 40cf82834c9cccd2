"""Writing plans from the run of a model."""

from .init.cut_parts import cut_parts
from .init.write import WRAPPING, Heading, plan_document, plan_text

__all__ = ["WRAPPING", "Heading", "cut_parts", "plan_document", "plan_text"]
