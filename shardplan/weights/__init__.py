"""Materialising planned models that were built on the meta device; loading and saving checkpoints."""

from .full_parameters import full_parameters
from .load import Loaded, load_checkpoint
from .materialize import materialize
from .progress import Progress
from .save import save_checkpoint
from .training_state import load_training_state, save_training_state

__all__ = [
    "Loaded",
    "Progress",
    "full_parameters",
    "load_checkpoint",
    "load_training_state",
    "materialize",
    "save_checkpoint",
    "save_training_state",
]
