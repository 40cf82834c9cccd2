"""Estimates as text."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.core.estimates import CATEGORIES, Estimate, Memory, PipelineEstimate, RefitEstimate
from shardplan.core.mesh import APPLIED, Axis, MeshSizes

from .color import Paint
from .table import table
from .width import printable

WITHOUT_PAIRS = "attn_implementation flash_attention_2 or flex_attention"  # these make no masks and scores
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def estimate_text(estimate: Estimate, *, color: bool, width: int | None = None) -> str:
    """The text of memory, communication, computation, the bound where there is one, and what the estimate leaves out.

    Args:
        width: the terminal's width in columns; without it, tables are as wide as their content.
    """
    paint = Paint(color)
    parts = [
        _asked(estimate, paint),
        *([_pipeline(estimate.pipeline, paint)] if estimate.pipeline else []),
        _memory(estimate, paint, width),
        _traffic(estimate, paint, width),
        _computation(estimate),
        *([_bound(estimate, paint, width)] if estimate.bound else []),
        *([_refit(estimate.refit)] if estimate.refit else []),
        "\n".join([paint("strong", "not modelled"), *(f"  {text}" for text in estimate.not_modelled)]),
    ]
    return "\n\n".join(parts)


def mesh_text(sizes: MeshSizes) -> str:
    """ "dp_shard 64 x tp 8"."""
    return sizes.text((Axis.PP, *APPLIED, Axis.EP)) or "1 device"


def bytes_text(number: float) -> str:
    """ "1.50 GiB"."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f} B"


def _title(estimate: Estimate) -> str:
    asked = estimate.asked
    overlay = ", sequence parallel" if asked.sequence_parallel else ""
    load = f", expert load {asked.step.expert_load:g}" if asked.step.expert_load != 1 else ""
    count = f"{asked.step.micro_batches:,} micro-batches of " if asked.step.micro_batches > 1 else ""
    return (
        f"{printable(asked.model)} ({estimate.parameters:,} parameters), plan {printable(asked.plan)}{overlay}\n"
        f"{count}{asked.step.micro_batch:,} x {asked.step.seq_len:,} tokens on a data-parallel rank, {asked.step.precision}, optimizer "
        f"{asked.step.optimizer}{load}"
    )


def _asked(estimate: Estimate, paint: Paint) -> str:
    traced = " and ".join(map(str, estimate.traced))
    layers = (
        f"{traced} of {estimate.layers} layers traced" if estimate.traced != (estimate.layers,) else "all layers traced"
    )
    size = f"{mesh_text(estimate.sizes)} ({estimate.sizes.world_size:,} devices), {layers}"
    return "\n".join([paint("strong", _title(estimate)), size])


def _pipeline(one: PipelineEstimate, paint: Paint) -> str:
    rows = [
        paint("strong", f"pipeline: schedule {one.schedule}, {one.micro_batches:,} micro-batches"),
        f"  blocks of the stages: {', '.join(map(str, one.sizes))}",
        f"  ranks wait {one.bubble:.1%} of the step",
        f"  peaks of the pp ranks: {', '.join(map(bytes_text, one.peaks))}",
        f"  memory is that of pp rank {one.fullest}, with {_flight(one.in_flight)} in flight",
        f"  operations and communication are those of pp rank {one.busiest}, which computes the longest",
    ]
    return "\n".join(rows)


def _flight(counts: Mapping[int, int]) -> str:
    return " and ".join(f"{count:,} micro-batches of stage {stage}" for stage, count in counts.items())


def _memory(estimate: Estimate, paint: Paint, width: int | None) -> str:
    memory = estimate.memory
    rows = [_header(("memory of a rank", "at the peak", "at most"), paint)]
    rows += [
        (f"  {category}", bytes_text(memory.peak.get(category, 0)), bytes_text(memory.most[category]))
        for category in CATEGORIES
        if memory.most.get(category)
    ]
    rows.append(("  sum", bytes_text(memory.total), ""))
    rows += [(f"  on the host: {category}", "", bytes_text(size)) for category, size in memory.host.items()]
    lines = table(rows, right=(1, 2), width=width)
    lines.append(f"  the peak is in the {peak_place(memory)}")
    if memory.most.get("masks and scores"):
        lines.append(f"  masks and scores grow with the square of the sequence: {WITHOUT_PAIRS} makes none")
    if estimate.device is not None:
        verdict = "fits" if estimate.fits else "does not fit"
        fraction = memory.total / estimate.device.memory
        text = f"  {verdict} {estimate.device.name}: {fraction:.0%} of {bytes_text(estimate.device.memory)}"
        lines.append(paint("good" if estimate.fits else "error", text))
    return "\n".join(lines)


def _header(titles: tuple[str, ...], paint: Paint) -> tuple[str, ...]:
    return tuple(paint("strong", title) for title in titles)


def peak_place(memory: Memory) -> str:
    """The part that runs at the peak. The model's own backward, before that of any module, is called the loss."""
    if memory.phase == "optimizer step":
        return memory.phase
    itself = "the loss" if memory.phase == "backward" else "the model's own code"
    return f"{memory.phase} of {printable(memory.module) or itself}"


def _traffic(estimate: Estimate, paint: Paint, width: int | None) -> str:
    if not estimate.traffic:
        return "no communication"
    rows = [_header(("communication of a step", "calls", "sent by a rank"), paint)]
    rows += [(f"  {one.axis} {one.collective}", f"{one.calls:,}", bytes_text(one.bytes)) for one in estimate.traffic]
    return "\n".join(table(rows, right=(1, 2), width=width))


def _computation(estimate: Estimate) -> str:
    products = ", ".join(f"{n / 1e12:,.2f} TFLOP in {dtype}" for dtype, n in estimate.flops.items())
    return f"computation of a rank in a step: {products or 'no products'}"


def _bound(estimate: Estimate, paint: Paint, width: int | None) -> str:
    bound, device = estimate.bound, estimate.device
    assert bound is not None and device is not None
    head = f"a step takes at least {seconds_text(bound.seconds)} on {device.name}, bounded by: {bound.by}"
    rows = [(f"  {term}", seconds_text(seconds)) for term, seconds in bound.terms.items()]
    rows += [("  waiting for collectives", seconds_text(bound.waiting))] if bound.waiting else []
    speed = f"  at most {estimate.tokens_per_second or 0:,.0f} tokens/s a device"
    return "\n".join([paint("strong", head), *table(rows, right=(1,), width=width), speed])


def _refit(refit: RefitEstimate) -> str:
    time = "" if refit.seconds is None else f", which takes at least {seconds_text(refit.seconds)}"
    return (
        f"a refit of the engine: {bytes_text(refit.bytes)} between all ranks, at most {bytes_text(refit.busiest)} out of one rank or into "
        f"one{time}"
    )


def seconds_text(seconds: float) -> str:
    """ "1.23 s", "4.56 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
