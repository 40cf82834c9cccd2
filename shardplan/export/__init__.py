"""Writes a program in the words of another project, and runs it in that project's own code."""

from .running import run_target
from .targets import TARGETS, Lowered, Target, lower_to

__all__ = ["TARGETS", "Lowered", "Target", "lower_to", "run_target"]
