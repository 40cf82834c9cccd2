"""The cost of a step of `shardplan.optimizers.Muon` on a rank: all matrices are traced, as a smaller model has other owners of matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardplan.compiler.lower.program import Program
from shardplan.core.estimates import Category, Question
from shardplan.core.mesh import DATA_PARALLEL, Axis
from shardplan.core.plan import MatrixParts, ResolvedPlan
from shardplan.model.found import FoundModel
from shardplan.optimizers import Muon, muon
from shardplan.optimizers.matrix_shards import Groups, Stack, stack_of
from shardplan.runtime.apply.kept_ties import restore_ties, tied_groups
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import PlanMesh
from shardplan.styles.backends import BACKENDS
from shardplan.torchlib.gathering import without_advice
from shardplan.torchlib.local_parts import to_local_if_dtensor
from shardplan.torchlib.private import private

from .fake_rank import fake_mesh, groups_of, without_memory
from .ledger import Bytes, Ledger, Moment, moments_of
from .meter import Meter
from .running_module import Place, Places
from .traced_step import DTYPES

_without_modes: Any = private("disable_modes")
STEPPING: Place = ("optimizer step", "")
WHOLE_MATRICES = ("muon", "whole-matrix")  # names of optimizers


def with_muon(ledger: Ledger, found: FoundModel, program: Program, asked: Question, *, offloaded: bool) -> Ledger:
    """The ledger of a step without an optimizer, with Muon for the matrices and AdamW for everything else added.

    Args:
        offloaded: parameters and optimizer state are in the host's memory.
    """
    [step] = muon_ledgers(found, program, asked, offloaded=offloaded)
    states: Bytes = {"optimizer state": step.moments[STEPPING].peak.get("optimizer state", 0)}

    def held(bytes: Bytes) -> dict[Category, int]:
        return dict(Counter(bytes) + Counter(states))

    moments = {place: Moment(held(one.peak), held(one.most)) for place, one in ledger.moments.items()}
    return replace(with_step(ledger, step), moments={**moments, **step.moments})


def with_step(ledger: Ledger, step: Ledger) -> Ledger:
    """The ledger of a step without an optimizer, with the optimizer's computations, collectives and memory accesses added."""
    return replace(
        ledger,
        flops=dict(Counter(ledger.flops) + Counter(step.flops)),
        calls=dict(Counter(ledger.calls) + Counter(step.calls)),
        bytes=dict(Counter(ledger.bytes) + Counter(step.bytes)),
        touched=ledger.touched + step.touched,
    )


def muon_ledgers(
    found: FoundModel,
    program: Program,
    asked: Question,
    *,
    offloaded: bool,
    roots_of: Sequence[Sequence[str]] = (("",),),
) -> list[Ledger]:
    """The optimizer's second step only, for the whole model.

    Args:
        program: the program on a mesh without stages.
        roots_of: for each ledger, the modules and parameters of a rank's stages; "" is the model.
    """
    resolved = program.resolved
    model = found.build("meta", DTYPES[asked.step.precision]).train()
    with fake_mesh(resolved.sizes) as mesh, without_advice(), ExitStack() as entered:
        mesh.check_sections(resolved)
        applied = apply_program(model, mesh, program, src_data_rank=None)
        entered.enter_context(without_memory())
        entered.enter_context(patch.object(muon, "check_same_gradients", _agreed))
        ties = tied_groups(applied)
        applied.to_empty(device="cpu")
        restore_ties(applied, ties)
        trained = {p for p in applied.parameters() if p.requires_grad}
        ledgers = []
        for roots in roots_of:
            own = {p for name, p in applied.named_parameters(remove_duplicate=False) if _below(name, roots)}
            for parameter in applied.parameters():
                parameter.requires_grad_(parameter in trained and parameter in own)
            ledgers.append(_stepped(applied, own, mesh, resolved, asked, offloaded=offloaded))
    return ledgers


def _stepped(
    applied: nn.Module,
    own: set[nn.Parameter],
    mesh: PlanMesh,
    resolved: ResolvedPlan,
    asked: Question,
    *,
    offloaded: bool,
) -> Ledger:
    """The ledger of the second step of those parameters that are trained.

    Args:
        own: the parameters that the rank has.
    """
    with _without_modes():  # it reads the ranks of the mesh
        whole_matrix = torch.clone if asked.step.optimizer == "whole-matrix" else None
        optimizer = Muon(applied, rest=partial(torch.optim.AdamW, foreach=True), whole_matrix=whole_matrix)
    section = resolved.data_parallel
    groups = dict(groups_of(mesh, BACKENDS[section.backend] if section is not None else None, {}))
    widest = next((axis for axis in (*DATA_PARALLEL, Axis.CP) if resolved.sizes.of(axis) > 1), Axis.TP)
    for group in (*(stack.group for stack in optimizer.stacks), optimizer.ranks):
        if group is not None and group.group_name not in groups:  # over several axes; these count as their slowest
            groups[group.group_name] = widest, group.size()
    places = Places()
    meter = Meter(places, groups, (), 0)
    with meter.running():
        parameters = [p for p in applied.parameters() if p.requires_grad]
        meter.mark([*own, *applied.buffers()], "parameters")
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        meter.mark((p.grad for p in parameters if p.grad is not None), "gradients")
        places.enter("optimizer step")
        optimizer.step()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        meter.mark(states, "optimizer state")
        meter.start()
        optimizer.step()
        log = meter.log
    optimizer.zero_grad()
    touched = sum(3 * to_local_if_dtensor(p).nbytes for p in parameters)
    touched += sum(2 * to_local_if_dtensor(x).nbytes for x in states)
    flops: Counter[str] = Counter()
    for (_, dtype), operations in log.flops.items():
        flops[dtype] += operations
    moments = moments_of(log, offloaded=offloaded)
    assert [*moments] == [STEPPING], [*moments]
    return Ledger(moments, flops, log.calls, log.bytes, 0, touched)


def owners_work(found: FoundModel, matrices: Mapping[str, MatrixParts]) -> int:
    """The operations in bfloat16 of one Muon step for all matrices of a model; the ranks that share the matrices divide them.

    Args:
        matrices: those that the plan takes apart.
    """
    optimizer = Muon(found.build("meta"))
    steps, groups = optimizer.param_groups[0]["ns_steps"], Groups()
    stacks = [stack_of(one.name, one.parameter, None, 1, matrices.get(one.name), groups) for one in optimizer.stacks]
    return sum(2 * steps * stack.shape[0] * stack.work for stack in stacks)


def _below(name: str, roots: Sequence[str]) -> bool:
    return any(root in ("", name) or name.startswith(f"{root}.") for root in roots)


def _agreed(stacks: Sequence[Stack], ranks: ProcessGroup) -> None:
    """The collective of `check_same_gradients`, without values."""
    dist.all_reduce(torch.empty(2 * len(stacks), dtype=torch.int32), dist.ReduceOp.MIN, group=ranks)
