"""Modules of experts that are distributed over ep: separate FSDP2 units, over a separate mesh."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardplan.compiler.lower.program import Program
from shardplan.core.tree import full_name, named
from shardplan.styles.backends import BACKENDS
from shardplan.styles.expert_shards import expert_dim

from .plan_mesh import PlanMesh


def check_experts(mesh: PlanMesh, program: Program) -> None:
    """Raise ValueError where the experts' gradients would not be averaged like the others: the plan has no data-parallel section
    with a capable backend, the section ignores a parameter, or one stack of a module is not distributed while others are."""
    resolved, sizes = program.resolved, mesh.sizes
    if not program.experts:
        return
    assert mesh.ep_size > 1, "the program is for another mesh"
    mixed = _left_whole(program)
    if mixed:
        raise ValueError(
            f"{named(mixed)} would stay whole in a module whose other parameters are distributed over ep: distribute "
            "all parameters of the module, or none"
        )
    section = resolved.data_parallel
    if section is not None and not BACKENDS[section.backend].experts:
        raise ValueError(f"expert parallelism needs the backend {_able()}, not {section.backend}")
    if section is None or mesh.data_parallel(BACKENDS[section.backend]) is None:
        if sizes.ep_shard > 1:
            raise ValueError(
                f"ep {sizes.ep} leaves {sizes.ep_shard} ranks with the same experts, whose gradients a data-parallel backend "
                f"adds up: the plan needs a data_parallel section with the backend {_able()}, and the mesh an axis dp_shard "
                "(of size 1 is enough)"
            )
        return
    if not isinstance(section.reshard_after_forward, bool | str):
        raise ValueError(
            f"reshard_after_forward is {section.reshard_after_forward}: experts that are distributed over ep cannot stay sharded "
            "over a number of ranks (FSDP2 cannot do it with DTensors): use true, false or all_but_last"
        )
    left = [name for name in sorted(resolved.dp_ignored.intersection(_parameters(program))) if _trained(program, name)]
    if left:
        raise ValueError(
            f"the data_parallel section ignores {named(left)}, but experts that are distributed over ep must be averaged: they "
            "have gradients of the tokens of several data-parallel ranks"
        )


def _able() -> str:
    return " or ".join(backend.name for backend in BACKENDS.values() if backend.experts)


def _left_whole(program: Program) -> list[str]:
    return [
        full_name(name, parameter.name)
        for name in program.experts
        for parameter in program.resolved.tree.modules[name].parameters
        if parameter.name not in {p.name for p in program.modules[name].parameters}
    ]


def _parameters(program: Program) -> list[str]:
    """The parameters of all modules of experts, and of the modules in them."""
    starts = tuple(f"{name}." for name in program.experts)
    return [name for name in program.resolved.tree.parameters if name.startswith(starts)]


def _trained(program: Program, name: str) -> bool:
    return program.resolved.tree.parameters[name][1].requires_grad


def placement_over(ranks: int) -> Callable[[nn.Parameter], Shard]:
    """A function that says along which dim FSDP2 shards a stack of experts over this number of ranks, by `expert_dim`.

    The function raises ValueError for a stack without such a dim.
    """

    def place(parameter: nn.Parameter) -> Shard:
        shape = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
        dim = expert_dim(shape, ranks)
        if dim is not None:
            return Shard(dim)
        raise ValueError(
            f"a stack of experts has the shape {tuple(shape)} on each ep rank, and ep_shard = {ranks} divides no dim of it: use another ep"
        )

    return place
