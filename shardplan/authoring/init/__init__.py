"""From a model to a plan."""

from .init_codes import CODES

__all__ = ["CODES"]
