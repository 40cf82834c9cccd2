"""Pipeline stages that run: a model is cut, each part is sharded as any model is, and torch.distributed.pipelining runs them."""

from .pipeline import Pipeline

__all__ = ["Pipeline"]
