"""Sampling: the ranks of a tp group draw the same random numbers, and so the same text; data-parallel ranks end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def sample_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make `model.generate`, if it exists, draw the random numbers of tp rank 0: `first_ranks_numbers`.

    Args:
        model: a transformers model, or the model that peft wraps.
        mesh: the one-dimensional tp mesh.
    """
    if callable(generate := getattr(model, "generate", None)):
        model.__dict__["generate"] = partial(_generate, generate, mesh)


def end_together(model: nn.Module) -> None:
    """Make transformers' code call the model, and the layers that it would skip at random, equally often on each rank. A forward
    gathers parameters from all data-parallel ranks, but their texts end at different lengths.

    Args:
        model: its parameters are sharded over ranks with different batches.
    """
    for module in model.modules():
        if module is model or any(isinstance(below, FSDPModule) for below in module.modules() if below is not module):
            # FSDP2's mark of a module. Modules inside a unit do not get it: torch.compile treats marked modules differently.
            vars(module).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def _generate(generate: Callable[..., Any], mesh: DeviceMesh, *args: Any, **options: Any) -> Any:
    with first_ranks_numbers(mesh):
        return generate(*args, **options)


@contextmanager
def first_ranks_numbers(mesh: DeviceMesh) -> Iterator[None]:
    """Draw tp rank 0's random numbers in this context, on the CPU and on the mesh's device. A collective.

    A rank whose generator was in another state gets that state back. One that was in the same state continues after the drawn
    numbers, as tp rank 0 does: ranks with one seed keep one state.
    """
    sources = [torch] if mesh.device_type == "cpu" else [torch, torch.get_device_module(mesh.device_type)]
    own = [source.get_rng_state() for source in sources]
    states = torch.cat(own).to(mesh.device_type)
    dist.broadcast(states, src=dist.get_global_rank(mesh.get_group(), 0), group=mesh.get_group())
    first = states.cpu().split([state.numel() for state in own])
    others = [
        (source, mine) for source, mine, its in zip(sources, own, first, strict=True) if not torch.equal(mine, its)
    ]
    for source, state in zip(sources, first, strict=True):
        source.set_rng_state(state)
    try:
        yield
    finally:
        for source, state in others:
            source.set_rng_state(state)
