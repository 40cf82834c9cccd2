"""The steps on one rank, a thread or a process: it applies the program to its copy of the model, runs the steps, and
gathers whole tensors, which are compared with those of the unsharded steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardplan.compiler.layout.randomness import DrawnAlike
from shardplan.compiler.lower.program import Program
from shardplan.core.layout import P, R, V
from shardplan.core.mesh import BATCHES, DATA_PARALLEL, Axis, MeshSizes
from shardplan.model.labels_over_cp import SEQUENCE
from shardplan.model.reduced.outcome import results_of
from shardplan.model.reduced.weights import writes_to
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh, read_mesh
from shardplan.runtime.apply.slices import Packing
from shardplan.runtime.apply.state import packed_parameters
from shardplan.runtime.parallel.tensor_moves import move
from shardplan.runtime.training.context_parallel import context_parallel
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.packing import unpack

from .exact import checked_sizes
from .steps import Batch, Steps, made, plain_call, run_steps

VIEWS = "FSDP2-wrapped module .* returned a view"  # torch warns in training of a change in place, which the proof would find


@dataclass(frozen=True)
class Left:
    """The results of the steps on a rank.

    Args:
        outputs: of each step, by path.
        gradients: by full parameter name.
        buffers: by full name.
        parameters: by full name; only those that a forward changes, of any rank or of the unsharded model.
    """

    outputs: Sequence[Mapping[str, Tensor]]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def mesh_of(sizes: MeshSizes, axes: Collection[Axis]) -> PlanMesh:
    """A mesh over all ranks. All ranks call it together.

    Args:
        axes: its axes other than tp, of any size. With a data-parallel axis dp_shard is there too, which FSDP2 needs, and where several ranks
            have the same experts, whose gradients FSDP2 adds up.
    """
    sharded = bool({*axes} & {*DATA_PARALLEL}) or (sizes.ep > 1 and sizes.ep_shard > 1)
    there = {*axes, Axis.TP} | ({Axis.DP_SHARD} if sharded else set())
    names = [axis for axis in Axis if axis in there and axis is not Axis.EP]
    shape = tuple(map(sizes.of, names))
    return read_mesh(init_device_mesh("cpu", shape, mesh_dim_names=tuple(axis.value for axis in names)), ep=sizes.ep)


def data_parallel_rank(mesh: PlanMesh) -> int:
    """This rank's index among the ranks with different batches; 0 where the mesh has no such axis."""
    index = 0
    for axis in BATCHES:
        if (name := mesh.names.get(axis)) is not None:
            index = index * mesh.mesh[name].size() + mesh.mesh.get_local_rank(name)
    return index


def rank_steps(
    model: nn.Module,
    mesh: PlanMesh,
    program: Program,
    batches: Sequence[Batch],
    reference: Steps,
    joined: Callable[[DTensor], bool] = lambda gradient: False,
    applied: Callable[[nn.Module], None] = lambda model: None,
    autocast: torch.dtype | None = None,
) -> Left:
    """Apply the program and run the steps. All ranks of the mesh call it together.

    Args:
        model: on the CPU, with the weights of the reference; it is used up.
        batches: this rank's batches.
        joined: whether the caller joins the ranks' parts of a gradient or a parameter; else these are made whole here, as all
            other tensors are.
        applied: called with the planned model.
        autocast: as for `apply_program`.
    """
    apply_program(model, mesh, program, src_data_rank=0, autocast=autocast)
    applied(model)
    given = iter(reference.directions)
    written = writes_to(model)
    with checked_sizes(model), DrawnAlike() if reference.drew else nullcontext():
        call = OwnTokens(mesh, reference) if returns_tokens(program.resolved.on_cp) else plain_call
        outputs = run_steps(model, batches, lambda results: next(given), call, own_loss=reference.size == 1)
    packed = packed_parameters(program)

    def made(name: str, value: Tensor) -> Tensor:
        parts = isinstance(value, DTensor) and joined(value)
        return value if parts else whole(value, packed.get(name), mesh.tp_size)

    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: made(name, p.grad) for name, p in parameters.items() if p.grad is not None}
    changed = {
        name: made(name, parameters[name].detach())
        for name in _on_any_rank(reference.written | written(), sorted(reference.parameters))
        if name in parameters
    }
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)}
    return Left([{name: whole(value) for name, value in step.items()} for step in outputs], gradients, buffers, changed)


def _on_any_rank(mine: Collection[str], names: Sequence[str]) -> list[str]:
    """The names that any rank has. A collective."""
    found = torch.tensor([name in mine for name in names], dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [name for name, hit in zip(names, found.tolist(), strict=True) if hit]


def whole(value: Tensor, packed: Packing | None = None, tp: int = 1) -> Tensor:
    """The whole tensor; rows of a packed parameter are in the original order. A collective for a DTensor."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return unpack(full, packed.dim, packed.parts, tp) if packed is not None and tp > 1 else full


# Steps of a plan with which each cp rank returns its own tokens' results, as a training loop makes them.
class OwnTokens:
    """Calls the model inside `context_parallel`, and makes its outputs whole: the loss is the mean of the ranks' losses.

    Args:
        mesh: one with a cp axis.
        reference: the unsharded steps.
    """

    def __init__(self, mesh: PlanMesh, reference: Steps):
        assert mesh.cp is not None
        self.mesh, self.reference = mesh.cp, reference

    def __call__(self, model: nn.Module, batch: dict[str, Any], step: int) -> Mapping[str, Tensor]:
        with context_parallel(model, **batch) as inputs:
            results = made(results_of(model(**inputs)))
        expected = self.reference.outputs[step]
        return {
            name: self._whole(value, expected[name]) if name in expected else value for name, value in results.items()
        }

    def _whole(self, value: Tensor, expected: Tensor) -> Tensor:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        ranks, shape = self.mesh.size(), list(expected.shape)
        if not shape:
            return move(value / ranks, self.mesh, P.on(Axis.CP), R.on(Axis.CP))
        if value.ndim == len(shape) > SEQUENCE and value.shape[SEQUENCE] * ranks == shape[SEQUENCE]:
            return move(value, self.mesh, V(SEQUENCE).on(Axis.CP), R.on(Axis.CP))
        return value
