"""Materialising planned models that were built on the meta device; loading and saving checkpoints."""

from .all_ranks import all_or_none
from .folders import clear, remove
from .full_parameters import full_parameters
from .load import Loaded, load_checkpoint
from .materialize import materialize
from .progress import Progress
from .refit import Refit, refit
from .save import save_checkpoint
from .shared_folder import whole_folder
from .training_state import load_training_state, save_training_state

__all__ = [
    "Loaded",
    "Progress",
    "Refit",
    "all_or_none",
    "clear",
    "full_parameters",
    "load_checkpoint",
    "load_training_state",
    "materialize",
    "refit",
    "remove",
    "save_checkpoint",
    "save_training_state",
    "whole_folder",
]
