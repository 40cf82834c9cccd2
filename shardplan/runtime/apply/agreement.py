"""Checks that all ranks are about to do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardplan.compiler.lower.program import Program


@contextmanager
def same_on_all_ranks(mesh: DeviceMesh) -> Iterator[Callable[[str], None]]:
    """Compare over the mesh what each rank is about to do, before anything else is communicated.

    The context yields a function that accepts a text for it. If a rank raises, the others raise here too, instead of
    waiting for it later.

    Raises:
        RuntimeError: the texts differ between ranks, or only some ranks failed.
    """
    reported: list[str] = []
    try:
        yield reported.append
    except Exception as error:
        _all_equal(f"failed: {error}", mesh)
        raise
    if not _all_equal("".join(reported), mesh):
        raise RuntimeError(
            "the ranks compiled different programs, or compiling failed on some ranks (another plan, model or version); "
            "compare compile_plan(...).describe() between the ranks"
        )


def intention(program: Program) -> str:
    """A program, the parameters that it is for and the options that it is applied with, as text."""
    resolved = program.resolved
    parameters = [f"{name} {p.shape} {p.dtype} {p.requires_grad}" for name, (_, p) in resolved.tree.parameters.items()]
    sections = (resolved.data_parallel, resolved.activation_checkpointing, resolved.compile)
    options = [repr(replace(section, location=None)) for section in sections if section is not None]
    return "\n".join([program.describe(), *parameters, *options])


def _all_equal(text: str, mesh: DeviceMesh) -> bool:
    """Whether every rank of the mesh has the same text."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return least([number, -number], mesh) == [number, -number]


def least(numbers: Sequence[int], mesh: DeviceMesh) -> list[int]:
    """The smallest of each number over all ranks of a mesh. A collective on each axis."""
    smallest = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return smallest.tolist()
