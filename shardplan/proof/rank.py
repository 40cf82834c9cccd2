"""The proof on one rank, whatever the ranks are: it applies the program to its copy of the model, runs the steps, and compares
whole tensors with the unsharded steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplan.compiler.lower.program import Program
from shardplan.core.report import Comparison
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.packing import unpack

from .compare import compare_steps
from .steps import Batch, Steps, run_steps


def rank_rows(
    model: nn.Module, mesh: PlanMesh, program: Program, batches: Sequence[Batch], reference: Steps
) -> tuple[Comparison, ...]:
    """What this rank has, beside the unsharded model. All ranks of the mesh call it together.

    Args:
        model: on the CPU, with the weights of the reference; it is used up.
        batches: this rank's own.
    """
    apply_program(model, mesh, program, src_data_rank=0)
    given = iter(reference.directions)
    outputs = run_steps(model, batches, lambda results: next(given))
    packed = packed_parameters(program)
    gradients = {
        name: whole(parameter.grad, packed.get(name), mesh.tp_size)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
    found = [{name: whole(value) for name, value in step.items()} for step in outputs]
    return compare_steps(reference, found, gradients, buffers)


def whole(value: torch.Tensor, packed: Packing | None = None, tp: int = 1) -> torch.Tensor:
    """The whole tensor, the rows of a packed parameter in the original order. A collective, of a DTensor."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return unpack(full, packed.dim, packed.parts, tp) if packed is not None and tp > 1 else full
