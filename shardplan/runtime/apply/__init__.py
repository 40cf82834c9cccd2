"""Applying a program to a model: the phases in order. No phase may change a name."""

from .applied import Applied, applied, without_sequence_parallel
from .build_mesh import build_mesh
from .phases import apply_program

__all__ = ["Applied", "applied", "apply_program", "build_mesh", "without_sequence_parallel"]
