"""A program in the words of another project, run in that project's own code."""

from .running import run_target
from .targets import TARGETS, Lowered, Target, lower_to

__all__ = ["TARGETS", "Lowered", "Target", "lower_to", "run_target"]
