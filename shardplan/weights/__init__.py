"""Materialising planned models that were built on the meta device."""

from .materialize import materialize

__all__ = ["materialize"]
