"""The steps on one rank, whatever the ranks are: it applies the program to its copy of the model, runs them, and has whole
tensors, which are compared with those of the unsharded steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardplan.compiler.lower.program import Program
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.torchlib.packing import unpack

from .steps import Batch, Steps, run_steps


@dataclass(frozen=True)
class Left:
    """What the steps leave behind on a rank.

    Args:
        outputs: of each step, by path.
        gradients: by full parameter name.
        buffers: by full name.
    """

    outputs: Sequence[Mapping[str, Tensor]]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def rank_steps(
    model: nn.Module,
    mesh: PlanMesh,
    program: Program,
    batches: Sequence[Batch],
    reference: Steps,
    joined: Callable[[DTensor], bool] = lambda gradient: False,
) -> Left:
    """Apply the program and run the steps. All ranks of the mesh call it together.

    Args:
        model: on the CPU, with the weights of the reference; it is used up.
        batches: this rank's own.
        joined: whether the caller makes the whole of a gradient that ranks have parts of; else it is whole, as all else is.
    """
    apply_program(model, mesh, program, src_data_rank=0)
    given = iter(reference.directions)
    outputs = run_steps(model, batches, lambda results: next(given))
    packed = packed_parameters(program)
    gradients = {
        name: gradient
        if isinstance(gradient, DTensor) and joined(gradient)
        else whole(gradient, packed.get(name), mesh.tp_size)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (gradient := parameter.grad) is not None
    }
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
    return Left([{name: whole(value) for name, value in step.items()} for step in outputs], gradients, buffers)


def whole(value: Tensor, packed: Packing | None = None, tp: int = 1) -> Tensor:
    """The whole tensor, the rows of a packed parameter in the original order. A collective, of a DTensor."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return unpack(full, packed.dim, packed.parts, tp) if packed is not None and tp > 1 else full
