"""Checks that all ranks are about to do the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
    low = torch.tensor([number, -number], dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return low.tolist() == [number, -number]


def _fingerprint(x: Tensor) -> float:
    flat = x.detach().reshape(-1).to(torch.float64)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).sqrt()
    return float((flat * weights).sum())


def check_inputs_once(model: nn.Module, mesh: DeviceMesh) -> None:
    """At the model's first call, compare the integer and boolean inputs (ids, masks) over the tp axis.

    The hook raises RuntimeError, naming the arguments and the tp ranks whose batch differs from rank 0's.
    """

    def compare(module: nn.Module, args: tuple, kwargs: dict) -> None:
        handle.remove()
        named = {**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}
        inputs = {n: x for n, x in named.items() if isinstance(x, Tensor) and not x.is_floating_point()}
        mine = torch.tensor([_fingerprint(x) for x in inputs.values()], dtype=torch.float64, device=mesh.device_type)
        ranks = [torch.empty_like(mine) for _ in range(mesh.size())]
        dist.all_gather(ranks, mine, group=mesh.get_group())
        wrong = {
            name: others
            for i, name in enumerate(inputs)
            if (others := [r for r, theirs in enumerate(ranks) if theirs[i] != ranks[0][i]])
        }
        if wrong:
            listed = "; ".join(f"{name} on tp ranks {others}" for name, others in wrong.items())
            raise RuntimeError(
                f"tensor-parallel ranks need the same batch, but these inputs differ from tp rank 0: {listed}. "
                "Pass the sampler the data-parallel rank and size, not those of the world"
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)
