"""Optimizers that step whole matrices, for models whose matrices are sharded."""

from .muon import Muon

__all__ = ["Muon"]
