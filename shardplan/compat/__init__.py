"""Names and training loops of other projects, a few lines each on top of ours."""

from .trainers import adopt

__all__ = ["adopt"]
