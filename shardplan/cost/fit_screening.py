"""Comparing many configurations without tracing each. The parts of the model are traced once for each tp size and each kind of
checkpointing, and are put together as a mesh divides them. The best configurations are estimated afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardplan.compiler.pipeline_cut import even_sizes
from shardplan.core.estimates import Bound, Device, Traffic
from shardplan.core.fits import Checkpointing, Choice, Order
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.schedules import SCHEDULES
from shardplan.core.stages import PipelineCut

from .depth import Depths
from .least_time import bound_of
from .overlap import ALONE
from .part_costs import PartCosts, Stored
from .pipeline_time import ahead, step_seconds
from .stage_costs import StageCosts, stage_seconds, stages_of

SCREENED = ("1f1b", "interleaved")


@dataclass(frozen=True, slots=True, eq=False)  # by identity: its stages are cached
class Table:
    """The parts of a model on one tp rank, for one sequence.

    Args:
        blocks: the names of the blocks.
    """

    blocks: tuple[str, ...]
    depths: Depths
    costs: Mapping[str, PartCosts]


@dataclass(frozen=True, slots=True)
class Bytes:
    """The bytes of one element: as stored, as computed with, of its gradient while it is added up, of the optimizer's states,
    and of the optimizer's temporary tensors."""

    stored: int
    computed: int
    added: int
    states: int
    updating: int = 0


@dataclass(frozen=True, slots=True)
class Screened:
    choice: Choice
    memory: int
    bound: Bound

    @property
    def order(self) -> Order:
        return Order.of(self.bound, self.memory)


def choices(
    sizes: MeshSizes,
    rows: int,
    *,
    checkpointing: Checkpointing,
    sequence_parallel: bool,
    sharded: bool,
    regather: bool,
    offload: bool = False,
) -> Iterator[Choice]:
    """The configurations of a mesh: each micro-batch and schedule that give `rows` sequences in a step."""
    ranks = sizes.dp_shard * sizes.dp_replicate
    own, left = divmod(rows, ranks)
    for micro_batch in (1, 2, 4, 8, 16) if not left else ():
        count, left = divmod(own, micro_batch)
        if left or not count:
            continue
        for schedule in SCREENED if sizes.pp > 1 else (None,):
            if schedule is None or SCHEDULES[schedule].misfit(sizes.pp, count) is None:
                yield Choice(
                    sizes, micro_batch, count, checkpointing, sharded, sequence_parallel, regather, schedule, offload
                )


def screen(choice: Choice, table: Table, width: Bytes, device: Device, owners: int = 0) -> Screened | None:
    """The approximate memory and bound of a configuration; None where it has fewer blocks than stages.

    Args:
        owners: the optimizer's operations in bfloat16; the ranks that share matrices divide them.
    """
    sizes, pp = choice.sizes, choice.sizes.pp
    schedule = SCHEDULES[choice.schedule] if choice.schedule else None
    laps = schedule.stages_per_rank if schedule else 1
    if len(table.blocks) < pp * laps:
        return None
    stages = [_scaled(one, choice.micro_batch) for one in _stages(table, pp, laps)]
    ranks = [stages[rank::pp] for rank in range(pp)]
    times = [sum(stage_seconds(one, device, sizes) for one in rank) for rank in ranks]
    busiest = ranks[times.index(max(times))]
    pipeline = step_seconds(times, choice.micro_batches, laps) if schedule else None
    memory = max(_memory(choice, rank, place, width) for place, rank in enumerate(ranks))
    flops: dict[str, int] = {}
    for one in busiest:
        for dtype, n in one.flops("forward", "backward").items():
            flops[dtype] = flops.get(dtype, 0) + n * choice.micro_batches
    if owners:
        flops["bfloat16"] = flops.get("bfloat16", 0) + owners // (sizes.world_size // sizes.dp_replicate)
    stored = sum((one.stored for one in busiest), Stored())
    touched = sum(one.touched for one in busiest) * choice.micro_batches
    touched += _share(stored, sizes) * (3 * width.stored + 2 * width.states)
    traffic = [*_data_parallel(choice, stored, width)]
    for one in busiest:
        for (axis, name), (calls, size) in one.traffic(choice.micro_batches).items():
            traffic.append(Traffic(axis, name, calls, size))
        sent = (one.handed + one.received) * choice.micro_batches
        traffic.append(Traffic(Axis.PP, "send", 1, sent))
    overlap = sum((one.overlap for one in busiest), ALONE) * choice.micro_batches
    return Screened(choice, memory, bound_of(device, sizes, flops, traffic, touched, overlap, pipeline))


@lru_cache(maxsize=256)
def _stages(table: Table, pp: int, laps: int) -> tuple[StageCosts, ...]:
    cut = PipelineCut(table.blocks, even_sizes(len(table.blocks), pp * laps), (), ())
    return stages_of(cut, table.costs, table.depths)


def _scaled(stage: StageCosts, rows: int) -> StageCosts:
    """A stage with `rows` sequences in a micro-batch."""

    def times(part: PartCosts) -> PartCosts:
        return replace(
            part,
            forward={d: n * rows for d, n in part.forward.items()},
            backward={d: n * rows for d, n in part.backward.items()},
            kept={c: n * rows for c, n in part.kept.items()},
            burst=part.burst * rows,
            traffic={key: (calls, size * rows) for key, (calls, size) in part.traffic.items()},
            overlap=part.overlap * rows,
        )

    return StageCosts(stage.names, tuple(map(times, stage.parts)), stage.received * rows, stage.handed * rows)


def _memory(choice: Choice, own: list[StageCosts], place: int, width: Bytes) -> int:
    sizes = choice.sizes
    parameters = sum((one.stored for one in own), Stored())
    elements, share = parameters.elements, _share(parameters, sizes)
    blocks = [part.stored.elements for one in own for part in one.parts]
    kept = sum(sum(one.kept.values()) for one in own)
    burst = max(one.burst[0] for one in own)
    stored = 0 if choice.offload else share * (2 * width.stored + width.states)
    updating = 0 if choice.offload else share * width.updating  # when activations are gone
    if choice.schedule is None:
        outside = elements - max(blocks) * sum(1 for n in blocks if n == max(blocks))
        held = (max(outside, 0) + 2 * max(blocks)) * width.computed + max(blocks) * width.added
        return stored + max(held + kept + burst, updating)
    in_flight = ahead(SCHEDULES[choice.schedule], sizes.pp, choice.micro_batches, place, len(own)) / len(own)
    buffers = choice.micro_batches * sum(one.received + one.handed for one in own)
    if not choice.offload:
        stored -= share * width.stored  # gradients stay whole until the last micro-batch
    whole = elements * (width.computed + width.added)
    running = int(whole + kept * in_flight + burst)
    return stored + buffers + max(running, share * width.stored + updating)


def _groups(stored: Stored, sizes: MeshSizes) -> tuple[tuple[int, int], ...]:
    """(elements, number of ranks over which they are sharded), for distributed experts and for the rest."""
    return (stored.elements - stored.experts, sizes.dp_shard * sizes.cp), (stored.experts, sizes.ep_shard)


def _share(stored: Stored, sizes: MeshSizes) -> int:
    """The number of elements that one rank keeps."""
    return sum(elements // ranks for elements, ranks in _groups(stored, sizes))


def _data_parallel(choice: Choice, stored: Stored, width: Bytes) -> Iterator[Traffic]:
    """FSDP2's collectives: it gathers parameters twice in each micro-batch, but once in a step of a pipeline."""
    sizes, pipelined = choice.sizes, choice.schedule is not None
    copies = sizes.dp_replicate
    times = 1 if pipelined else choice.micro_batches
    moved = sum(elements * (n - 1) // n for elements, n in _groups(stored, sizes))
    if moved:
        yield Traffic(Axis.DP_SHARD, "all_gather", 1, moved * width.computed * times * (1 if pipelined else 2))
        yield Traffic(Axis.DP_SHARD, "reduce_scatter", 1, moved * width.added * times)
    if copies > 1:
        share = _share(stored, sizes) * width.added
        yield Traffic(Axis.DP_REPLICATE, "all_reduce", 1, 2 * share * (copies - 1) // copies * times)
