"""Applying a program to a model: the phases in order, each held to the names-unchanged contract."""

from .applied import Applied, applied, without_sequence_parallel
from .apply import apply_program

__all__ = ["Applied", "applied", "apply_program", "without_sequence_parallel"]
