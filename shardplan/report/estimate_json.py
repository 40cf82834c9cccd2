"""Estimates as records of their JSON form."""

from __future__ import annotations

from shardplan.core.estimates import CATEGORIES, Estimate, Memory, PipelineEstimate, Question, Sweep

from .records import (
    VERSION,
    AskedRecord,
    BoundRecord,
    EstimateRecord,
    EstimateReport,
    FlopsRecord,
    InFlightRecord,
    MemoryPart,
    MemoryRecord,
    Mesh,
    RefusedRecord,
    ScheduleRecord,
    SweepReport,
    TermRecord,
    TrafficRecord,
)


def estimate_record(estimate: Estimate) -> EstimateReport:
    return EstimateReport(
        "estimate", VERSION, asked_record(estimate.asked), mesh_record(estimate), estimate.not_modelled
    )


def sweep_record(sweep: Sweep) -> SweepReport:
    first = sweep.estimates[0]
    return SweepReport(
        kind="sweep",
        version=VERSION,
        asked=asked_record(first.asked),
        devices=sweep.gpus,
        estimates=tuple(map(mesh_record, sweep.estimates)),
        refused=tuple(RefusedRecord(Mesh.of(sizes), reason) for sizes, reason in sweep.refused),
        not_modelled=first.not_modelled,
    )


def asked_record(asked: Question) -> AskedRecord:
    return AskedRecord(
        asked.model,
        asked.plan,
        asked.sequence_parallel,
        asked.step.seq_len,
        asked.step.micro_batch,
        asked.step.precision,
        asked.step.optimizer,
        asked.step.expert_load,
        asked.step.micro_batches,
        asked.step.schedule,
    )


def mesh_record(one: Estimate) -> EstimateRecord:
    return EstimateRecord(
        mesh=Mesh.of(one.sizes),
        parameters=one.parameters,
        held=one.held,
        memory=_memory(one.memory),
        flops=tuple(FlopsRecord(dtype, operations) for dtype, operations in one.flops.items()),
        traffic=tuple(TrafficRecord(t.axis, t.collective, t.calls, t.bytes) for t in one.traffic),
        layers=one.layers,
        traced=one.traced,
        bound=_bound(one),
        pipeline=_pipeline(one.pipeline),
    )


def _pipeline(one: PipelineEstimate | None) -> ScheduleRecord | None:
    if one is None:
        return None
    return ScheduleRecord(
        sizes=one.sizes,
        bubble=one.bubble,
        peaks=one.peaks,
        fullest=one.fullest,
        in_flight=tuple(InFlightRecord(stage, count) for stage, count in one.in_flight.items()),
        busiest=one.busiest,
    )


def _memory(memory: Memory) -> MemoryRecord:
    parts = tuple(MemoryPart(c, memory.peak.get(c, 0), memory.most[c]) for c in CATEGORIES if memory.most.get(c))
    host = tuple(MemoryPart(category, 0, size) for category, size in memory.host.items())
    return MemoryRecord(memory.total, memory.phase, memory.module, parts, host)


def _bound(one: Estimate) -> BoundRecord | None:
    if one.bound is None or one.device is None:
        return None
    return BoundRecord(
        device=one.device.name,
        device_memory=one.device.memory,
        fits=bool(one.fits),
        seconds=one.bound.seconds,
        by=one.bound.by,
        terms=tuple(TermRecord(what, seconds) for what, seconds in one.bound.terms.items()),
        tokens_per_second=one.tokens_per_second,
    )
