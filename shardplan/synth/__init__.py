"""From a model to a plan."""

from .codes import CODES

__all__ = ["CODES"]
