"""The phases around activation checkpointing that give a model's modules their random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from shardplan.compiler.lower.program import Program
from shardplan.core.module_program import Draws
from shardplan.core.tree import ancestors
from shardplan.runtime.parallel.forward import wrap_forward
from shardplan.runtime.parallel.random_streams import OnCommonStream, OnModelStream, OnOwnStream, Streams
from shardplan.runtime.parallel.regime import Regime

from .plan_mesh import PlanMesh

ByVariant = Mapping[str, Mapping[str, Draws]]  # module -> variant -> whose numbers it draws


def draws_of(program: Program) -> ByVariant:
    """Which random numbers each module draws, in each variant."""
    found: dict[str, dict[str, Draws]] = {}
    for variant, modules in program.by_name.items():
        for name, module in modules.items():
            if module.draws is not None:
                found.setdefault(name, {})[variant] = module.draws
    return found


def shared_seed(mesh: PlanMesh) -> int:
    """The seed of the mesh's first rank (`torch.initial_seed`), on all ranks. A collective that draws nothing."""
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=mesh.mesh.device_type)
    for axis in range(mesh.mesh.ndim):
        dist.broadcast(seed, group=mesh.mesh.get_group(axis), group_src=0)
    return int(seed.item())


def streams_of(mesh: PlanMesh, seed: int, place: tuple[int, ...] = ()) -> Streams:
    """This rank's streams.

    Args:
        place: the model's place among others with the same seed.
    """
    assert mesh.tp is not None  # without tp no module's numbers are managed
    others = tuple(mesh.mesh[name].get_local_rank() for name in mesh.names.values() if name != mesh.tp_name)
    return Streams(seed, (*place, *others), mesh.tp.get_local_rank(), mesh.mesh.device_type)


def use_own_streams(model: nn.Module, draws: ByVariant, streams: Streams, regime: Regime) -> None:
    """Wrap modules inside of checkpoints: a checkpoint runs them again from the same random state."""
    for name, of_module in draws.items():
        if set(of_module.values()) == {"inside"}:
            continue
        switches = frozenset(v for v, whose in of_module.items() if whose == "own" and _around(draws, name, v) != "own")
        module = model.get_submodule(name)
        wrap_forward(module, OnOwnStream(streams, regime, name, of_module, switches, _below(model, draws, name)))


def use_common_streams(model: nn.Module, draws: ByVariant, streams: Streams, regime: Regime) -> None:
    """Wrap modules outside of checkpoints, which keep the random state that they begin with."""
    for name, of_module in draws.items():
        inside = frozenset(
            v for v, whose in of_module.items() if whose == "common" and _around(draws, name, v) == "own"
        )
        if inside:
            wrap_forward(
                model.get_submodule(name),
                OnCommonStream(streams, regime, name, inside, _below(model, draws, name)),
            )
    wrap_forward(model, OnModelStream(streams, _below(model, draws, "")))


def _around(draws: ByVariant, name: str, variant: str) -> Draws:
    """Whose random numbers the code around a module draws: "own" or "common"."""
    for above in ancestors(name):
        whose = draws.get(above, {}).get(variant)
        if whose in ("own", "common"):
            return whose
    return "common"


def _below(model: nn.Module, draws: ByVariant, name: str) -> tuple[nn.Module, ...]:
    return tuple(_modules(model, draws, name))


def _modules(model: nn.Module, draws: ByVariant, name: str) -> Iterator[nn.Module]:
    for other in draws:
        if other == name or not name or other.startswith(f"{name}."):
            yield model.get_submodule(other)
