"""The cost of sending the weights of a planned model to an inference engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from shardplan.compiler.pipeline import Changes
from shardplan.core.estimates import Device, EngineRanks, RefitEstimate, TrainingStep
from shardplan.core.mesh import MeshSizes
from shardplan.cost.fake_rank import fake_mesh
from shardplan.cost.step_options import modelled
from shardplan.cost.traced_step import DTYPES
from shardplan.runtime.apply.phases import apply_program
from shardplan.torchlib.gathering import without_advice
from shardplan.weights.refit import of_every_rank, refit_bytes
from shardplan.weights.slices_sent import busiest
from shardplan.weights.whole_tensors import Described

from .deciding import Asked, program_or_raise
from .keywords import sizes_of


def refit_estimate(
    asked: Asked,
    sizes: MeshSizes,
    step: TrainingStep,
    engine: EngineRanks,
    device: Device | None,
    progress: Callable[[str], None],
) -> RefitEstimate:
    """The cost of one refit. Raises as `estimate`."""
    own = replace(asked, plan=engine.plan, changes=Changes())
    trainer = _rows(asked, sizes, step.precision, progress)
    rows = _rows(own, sizes_of(engine.mesh), engine.precision, progress)
    sent = refit_bytes(trainer, rows, engine.first, DTYPES[engine.precision])
    seconds = None
    if device is not None:
        inside = {pair: size for pair, size in sent.items() if _node(pair[0], device) == _node(pair[1], device)}
        between = Counter({pair: size for pair, size in sent.items() if pair not in inside})
        seconds = max(busiest(inside) / device.node_bandwidth, busiest(between) / device.network_bandwidth)
    return RefitEstimate(sum(sent.values()), busiest(sent), seconds)


def _node(rank: int, device: Device) -> int:
    return rank // device.node_gpus


def _rows(asked: Asked, sizes: MeshSizes, precision: str, progress: Callable[[str], None]) -> list[list[Described]]:
    """The tensors that each rank of a mesh holds."""
    if sizes.pp > 1:
        raise ValueError(
            f"the refit of stages (pp {sizes.pp}) is not estimated: write estimate(...) without engine=, and read "
            "refit(trainer, engine).bytes in the job"
        )
    sizes = modelled(sizes)
    compiled = replace(asked, allow_unproven=True).compiled(sizes, progress)
    program = program_or_raise(compiled)
    found, _ = compiled.given.both
    model = found.build("meta", DTYPES[precision])
    progress(f"what ranks of {sizes.text() or 'one device'} hold")
    with fake_mesh(program.resolved.sizes) as mesh, without_advice():
        return of_every_rank(apply_program(model, mesh, program, src_data_rank=None), sizes.world_size)
