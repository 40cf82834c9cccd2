"""Estimating a mesh with pipeline stages: the parts of the model are traced on one stage, and put together by a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from shardplan.compiler.lower.program import Program
from shardplan.compiler.pipeline_cut import pipeline_cut
from shardplan.core.estimates import (
    OFFLOADED,
    Category,
    Device,
    Memory,
    Phase,
    PipelineEstimate,
    Question,
)
from shardplan.core.mesh import Axis
from shardplan.core.schedules import SCHEDULES
from shardplan.core.stages import PipelineCut
from shardplan.model.found import FoundModel
from shardplan.runtime.pipeline.layout_of_stages import stage_sizes
from shardplan.runtime.pipeline.refused_plans import for_stages

from .depth import cut, depths_of
from .ledger import Ledger
from .muon_step import STEPPING, WHOLE_MATRICES, muon_ledgers, with_step
from .overlap import ALONE
from .part_costs import Stored
from .pipeline_time import Moment, StageBytes, fullest, step_seconds
from .stage_costs import StageCosts, hand_over, sends, stage_seconds, stages_of
from .traced_parts import PartNames
from .traced_step import step_ledger


class Unschedulable(ValueError):
    """The mesh or the plan does not allow a schedule."""


class PipelineLedger:
    """The cost of a pipeline's step on its ranks.

    Args:
        pipeline: its schedule.
        seconds: the seconds of the step; without a device, its operations.
        memory: the memory of the fullest rank.
        ledger: flops, calls and bytes of the busiest rank, and the stored elements of the fullest one.
    """

    def __init__(self, pipeline: PipelineEstimate, seconds: float, memory: Memory, ledger: Ledger) -> None:
        self.pipeline, self.seconds, self.memory, self.ledger = pipeline, seconds, memory, ledger


def pipeline_ledger(
    found: FoundModel,
    program: Program,
    asked: Question,
    device: Device | None,
    *,
    offloaded: bool,
    progress: Callable[[str], None],
) -> tuple[PipelineLedger, int, int]:
    """The ledger, the number of layers, and the number of traced layers.

    Raises:
        Unschedulable: the schedule does not work with the micro-batches, the mesh, the plan or the number of blocks.
    """
    sizes, step, schedule = program.resolved.sizes, asked.step, SCHEDULES[asked.step.schedule]
    pp, count = sizes.pp, step.micro_batches
    if (why := schedule.misfit(pp, count)) is not None:
        raise Unschedulable(f"{why}: see --micro-batches and --schedule")
    wrapped = program.resolved.data_parallel is not None and sizes.dp_shard * sizes.dp_replicate > 1
    try:
        program = for_stages(program, wrapped=wrapped)
        lengths = stage_sizes(program.resolved, schedule, pp, None, count)
    except ValueError as error:
        raise Unschedulable(str(error)) from None
    resolved = program.resolved
    divided = pipeline_cut(resolved, lengths)
    depths = depths_of(found, program)
    depth = depths.traced[-1]
    inner = Program(replace(resolved, sizes=replace(sizes, pp=1)), program.variants)
    layers = f", {depth} of {depths.count} layers" if depth != depths.count else ""
    progress(f"tracing the stages of {sizes.text((Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.TP))}{layers}")
    once = replace(asked, step=replace(step, micro_batches=1))
    shorten = partial(cut, depths=depths, depth=depth)
    ledger = step_ledger(found, inner, once, shorten=shorten, names=PartNames.of(resolved))
    stages = stages_of(divided, ledger.parts, depths)
    own = [list(range(rank, divided.stages, pp)) for rank in range(pp)]
    added = wrapped and count > 1
    times = [stage_seconds(stage, device, sizes) for stage in stages]
    busy = [sum(times[stage] for stage in one) for one in own]
    largest = max(stage.handed for stage in stages)
    handing = hand_over(largest, Axis.PP, device, sizes) if device is not None else 0.0
    seconds = step_seconds(busy, count, divided.stages // pp, handing)
    kept = [StageBytes(sum(stage.kept.values()), _gradients(stage.stored, added)) for stage in stages]
    moments = [fullest(schedule, pp, count, rank, kept) for rank in range(pp)]
    keep = resolved.data_parallel is not None and resolved.data_parallel.reshard_after_forward is False
    updates: Sequence[Ledger | None] = [None] * pp
    if step.optimizer in WHOLE_MATRICES:
        progress(f"tracing the optimizer's step of {pp} pp ranks")
        roots = [[root for stage in one for root in divided.roots_of(stage)] for one in own]
        updates = muon_ledgers(found, inner, asked, offloaded=offloaded, roots_of=roots)
    how = {"added": added, "whole": keep, "offloaded": offloaded}
    memories = [
        _memory(divided, stages, own[rank], moment, count, ledger, updates[rank], **how)
        for rank, moment in enumerate(moments)
    ]
    peaks = tuple(memory.total for memory in memories)
    full, busiest = peaks.index(max(peaks)), busy.index(max(busy))
    bubble = 1 - count * sum(busy) / (seconds * pp) if seconds else 0.0
    pipeline = PipelineEstimate(schedule.name, count, lengths, bubble, peaks, full, moments[full].in_flight, busiest)
    totals = _totals(stages, own[busiest], count, stored=_stored(stages, own[full]))
    if (update := updates[busiest]) is not None:
        totals = with_step(totals, update)
    return PipelineLedger(pipeline, seconds, memories[full], totals), depths.count, depth


def _totals(stages: tuple[StageCosts, ...], own: list[int], micro_batches: int, *, stored: Stored) -> Ledger:
    """A step of one rank."""
    flops: Counter[str] = Counter()
    calls: Counter[tuple[Axis, str]] = Counter()
    sent: Counter[tuple[Axis, str]] = Counter()
    touched, overlap = 0, ALONE
    for stage in own:
        one = stages[stage]
        flops.update({dtype: n * micro_batches for dtype, n in one.flops("forward", "backward").items()})
        for key, (count, size) in one.traffic(micro_batches).items():
            calls[key] += count
            sent[key] += size
        overlap += one.overlap * micro_batches
        touched += one.touched * micro_batches + (
            3 * one.stored.bytes + 2 * one.stored.states if one.stored.states else 0
        )
    calls[Axis.PP, "send"], sent[Axis.PP, "send"] = sends(stages, own, micro_batches)
    return Ledger({}, dict(flops), dict(calls), dict(sent), stored.elements, touched, overlap)


def _stored(stages: tuple[StageCosts, ...], own: Iterable[int]) -> Stored:
    """The stored parameters of a rank's stages."""
    return sum((stages[stage].stored for stage in own), Stored())


def _gradients(stored: Stored, added: bool) -> int:
    """The bytes of the gradients. FSDP2 adds them up, in the size of the whole parameters, until it reduces them at the last
    micro-batch."""
    return stored.whole if added else stored.bytes


def _memory(
    divided: PipelineCut,
    stages: tuple[StageCosts, ...],
    own: list[int],
    moment: Moment,
    micro_batches: int,
    ledger: Ledger,
    update: Ledger | None,
    *,
    added: bool,
    whole: bool,
    offloaded: bool,
) -> Memory:
    """The memory of a rank at its peak: where its forwards keep the most, with the gradients at that time, or where its optimizer steps.

    Args:
        moment: the moment with the most bytes.
        update: the optimizer's step of this rank, where it was traced separately.
        added: whether FSDP2 adds up gradients of several micro-batches.
        whole: whether parameters stay gathered between micro-batches.
    """
    stored = _stored(stages, own)
    traced = sum((part.stored for part in ledger.parts.values()), Stored())
    gathered = max((one.most.get("gathered parameters", 0) for one in ledger.moments.values()), default=0)
    if whole and traced.whole:
        gathered = gathered * stored.whole // traced.whole
    kept: Counter[Category] = Counter()
    for stage, count in moment.in_flight.items():
        kept.update({category: size * count for category, size in stages[stage].kept.items()})
    (burst, where), _ = max((stages[stage].burst, stage) for stage in own)
    # torch receives each micro-batch, and each gradient, into a buffer of its own.
    buffers = micro_batches * sum(stages[stage].received + stages[stage].handed for stage in own)
    peak: Counter[Category] = Counter(kept)
    peak["parameters"] = stored.bytes
    states, temporary = stored.states, 0
    if update is not None:
        step = update.moments[STEPPING].peak
        states, temporary = step.get("optimizer state", 0), step.get("temporaries", 0)
    elif (stepping := ledger.moments.get(STEPPING)) is not None and traced.bytes:
        temporary = int(stepping.most.get("temporaries", 0) * stored.bytes / traced.bytes)
    peak["optimizer state"] = states
    peak["gathered parameters"] = gathered
    peak["gradients"] = _gradients(_stored(stages, moment.trained), added)
    peak["temporaries"] += burst + buffers
    phase: Phase = "backward"
    after: Counter[Category] = Counter(
        {
            "parameters": stored.bytes,
            "optimizer state": states,
            "gathered parameters": gathered if whole else 0,
            "gradients": stored.bytes,
            "temporaries": temporary + buffers,
        }
    )
    most = {category: max(peak[category], after[category]) for category in {*peak, *after}}
    most["gradients"] = max(most["gradients"], _gradients(stored, added))
    host: dict[Category, int] = {}
    if offloaded:
        host = {category: most.pop(category) for category in OFFLOADED if category in most}
        for category in OFFLOADED:
            peak.pop(category, None)
            after.pop(category, None)
    if sum(after.values()) > sum(peak.values()):
        peak, phase, where = after, "optimizer step", ""
    module = where if where in divided.blocks else ""
    return Memory({c: n for c, n in peak.items() if n}, phase, module, {c: n for c, n in most.items() if n}, host)
