"""Optimizers that step whole matrices, for models whose parameters are sharded."""

from .muon import Muon
from .published_steps import stepped_by

__all__ = ["Muon", "stepped_by"]
