"""Inference with a model that is sharded for training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardplan.runtime.parallel.fsdp_units import units_of


@contextmanager
def unshard(model: nn.Module) -> Iterator[nn.Module]:
    """Gather the parameters of all FSDP2 units inside a model once, for any number of forwards, and shard them again at
    the end.

    Without it each forward gathers each unit again. It costs the memory of the whole model (of this rank's
    tensor-parallel part, if there is one), in the dtype that FSDP2 computes in. At the end, units that were unsharded
    before stay so, and units have their former `reshard_after_forward`; this also happens before an exception in the body
    or in a forward is raised. The caller chooses training or evaluation mode. It is meant for inference: an optimizer step
    in the body does not reach the gathered parameters.

    Args:
        model: with FSDP2 inside; all its ranks enter together.

    Raises:
        TypeError: it is not a module.
        ValueError: it has no FSDP2 unit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch Module, not {type(model).__name__}")
    units = units_of(model.modules())
    if not units:
        raise ValueError("the model has no FSDP2 unit to unshard (fully_shard was not called on it)")
    try:
        with torch.inference_mode(False), torch.no_grad():  # training may later use the tensors that are gathered here
            for unit in units:
                unit.gather()
        yield model
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.restore()
