"""ResolvedPlan -> Program: what to store and what to move at each module."""

from .lowering import lower, shared_parameters, split_parameters
from .program import Program

__all__ = ["Program", "lower", "shared_parameters", "split_parameters"]
