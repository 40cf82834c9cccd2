"""ResolvedPlan -> Program: what to store and what to move at each module."""

from .lowering import lower, split_parameters
from .program import Program

__all__ = ["Program", "lower", "split_parameters"]
