"""The costs of pipeline stages: the parts of a traced model, put together as a cut divides them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardplan.core.estimates import Category, Device, Traffic
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.stages import PipelineCut

from .depth import Depths
from .overlap import ALONE, WAITED, Overlap, computing, placed, waiting
from .part_costs import PartCosts, Stored
from .traced_parts import FIRST, LAST, SHARED

NOTHING = PartCosts()


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one micro-batch in a stage.

    Args:
        names, parts: the names and the costs of its parts, in the order in which they run.
        received: bytes from the stage before; 0 for the first stage.
        handed: bytes for the next stage; 0 for the last one.
    """

    names: tuple[str, ...]
    parts: tuple[PartCosts, ...]
    received: int
    handed: int

    @property
    def kept(self) -> dict[Category, int]:
        total: Counter[Category] = Counter()
        for part in self.parts:
            total.update(part.kept)
        return dict(total)

    @property
    def stored(self) -> Stored:
        return sum((part.stored for part in self.parts), Stored())

    @property
    def touched(self) -> int:
        return sum(part.touched for part in self.parts)

    @property
    def overlap(self) -> Overlap:
        return sum((part.overlap for part in self.parts), ALONE)

    def flops(self, *kinds: str) -> dict[str, int]:
        """dtype -> operations of the forward, the backward, or both."""
        total: Counter[str] = Counter()
        for part in self.parts:
            for kind in kinds:
                total.update(getattr(part, kind))
        return dict(total)

    @property
    def burst(self) -> tuple[int, str]:
        """The maximum, over time, of the bytes in addition to those that the stage keeps for the micro-batch, and its place.
        While a part runs, the parts after it keep nothing yet, or nothing any more."""
        most, where, after = 0, self.names[-1], 0
        for name, part in reversed(list(zip(self.names, self.parts, strict=True))):
            kept = sum(part.kept.values())
            if part.burst - kept - after > most:
                most, where = part.burst - kept - after, name
            after += kept
        return most, where

    def traffic(self, micro_batches: int) -> dict[tuple[Axis, str], tuple[int, int]]:
        """(axis, collective) -> (calls, bytes) of a step."""
        calls: Counter[tuple[Axis, str]] = Counter()
        sent: Counter[tuple[Axis, str]] = Counter()
        for part in self.parts:
            for key, (count, size) in part.traffic.items():
                times = micro_batches if key[0] in WAITED else 1  # the other axes move values once in a step
                calls[key] += times * count
                sent[key] += times * size
        return {key: (calls[key], sent[key]) for key in calls}


def stages_of(cut: PipelineCut, costs: Mapping[str, PartCosts], depths: Depths) -> tuple[StageCosts, ...]:
    """The costs of each stage.

    Args:
        costs: the costs of each part at the traced depth.
    """

    def of(name: str) -> PartCosts:
        return costs.get(depths.like(name), NOTHING)

    carried = sum(of(name).handed for name in cut.carried)
    made: list[StageCosts] = []
    for stage in range(cut.stages):
        blocks = cut.blocks_of(stage)
        last = stage == cut.stages - 1
        names = ((FIRST,) if stage == 0 else ()) + (SHARED, *blocks) + ((LAST,) if last else ())
        received = made[-1].handed if made else 0
        made.append(StageCosts(names, tuple(map(of, names)), received, 0 if last else of(blocks[-1]).handed + carried))
    return tuple(made)


def stage_seconds(stage: StageCosts, device: Device | None, sizes: MeshSizes) -> float:
    """The seconds of one micro-batch in a stage, forward and backward: products or reads of parameters at full speed, whichever take longer, and the
    collectives that the stage waits for; without a device, its operations."""
    if device is None:
        return sum(stage.flops("forward", "backward").values())
    forward, backward = stage.flops("forward"), stage.flops("backward")
    reading = stage.touched / 3 / device.memory_bandwidth  # in the forward, for the gradients of inputs, of weights
    traffic = [Traffic(axis, name, calls, size) for (axis, name), (calls, size) in stage.traffic(1).items()]
    working = max(computing(device, forward), reading) + max(computing(device, backward), 2 * reading)
    return working + waiting(device, sizes, traffic, stage.overlap)


def hand_over(size: int, axis: Axis, device: Device, sizes: MeshSizes) -> float:
    """The seconds in which a rank sends bytes over an axis; over the network where a group is in several nodes."""
    inside, crosses = placed(axis, sizes, device.node_gpus)
    return size / inside / device.network_bandwidth if crosses else size / device.node_bandwidth


def sends(stages: Sequence[StageCosts], own: Iterable[int], micro_batches: int) -> tuple[int, int]:
    """(calls, bytes) of a rank's sends to other stages in a step: results in the forward, gradients in the backward."""
    calls = size = 0
    for stage in own:
        for other, sent in ((stage + 1, stages[stage].handed), (stage - 1, stages[stage].received)):
            if 0 <= other < len(stages):
                calls += micro_batches
                size += micro_batches * sent
    return calls, size
