"""Running pipeline stages: a model is cut, each part is sharded like any model, and torch.distributed.pipelining runs them."""

from .pipeline_options import PipelineOptions
from .pipelined_model import Pipeline

__all__ = ["Pipeline", "PipelineOptions"]
