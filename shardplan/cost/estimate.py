"""Estimating one mesh: a program is applied to the cut model, traced, and the costs are put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardplan.compiler.lower.program import Program
from shardplan.core.estimates import OFFLOADED, Category, Device, Estimate, Memory, Question, Traffic
from shardplan.model.found import FoundModel
from shardplan.styles.backends import BACKENDS

from .depth import Depths, cut, depths_of, whole
from .least_time import bound_of
from .ledger import Bytes, Ledger
from .muon_step import WHOLE_MATRICES, with_muon
from .pipeline_estimate import pipeline_ledger
from .traced_step import step_ledger

ALWAYS_LEFT_OUT = (
    "the memory of the device's driver, its libraries and the communicators",
    "fragmentation: the peak is the sum of what is allocated, not of what the allocator reserves",
    "kernels that need memory of their own, other than the ones for the CPU",
    "latency, launches, and what cannot be overlapped: the time is a bound",
)


def estimate_mesh(
    found: FoundModel,
    program: Program,
    asked: Question,
    device: Device | None,
    progress: Callable[[str], None] = lambda text: None,
) -> Estimate:
    """The cost of one step of a planned model.

    Args:
        program: the program, compiled for the mesh.
        progress: called with a text for each stage.

    Raises:
        PlanError: SP560.
        Unschedulable: the schedule of pipeline stages does not work here.
        ValueError: a data-parallel backend other than fsdp2; data-parallel ranks without a section `data_parallel` in the
            plan; a dtype for which the device has no speed; an existing process group.
    """
    resolved = program.resolved
    sizes, section = resolved.sizes, resolved.data_parallel
    if section is not None and not BACKENDS[section.backend].traceable:
        known = ", ".join(name for name, backend in BACKENDS.items() if backend.traceable)
        raise ValueError(f"estimate supports the data-parallel backend {known}, not {section.backend}")
    offloaded = section is not None and bool(section.cpu_offload)
    muon = asked.step.optimizer in WHOLE_MATRICES
    if sizes.pp > 1:
        made, layers, depth = pipeline_ledger(found, program, asked, device, offloaded=offloaded, progress=progress)
        ledger, memory, pipeline = made.ledger, made.memory, made.pipeline
        traced: tuple[int, ...] = (depth,)
        seconds: float | None = made.seconds
    else:
        ledger, depths = _whole_ledger(found, program, asked, offloaded=offloaded, progress=progress)
        layers, traced, pipeline = depths.count, depths.traced, None
        if muon:
            progress(f"tracing the optimizer's step of {depths.count} layers")
            ledger = with_muon(ledger, found, program, asked, offloaded=offloaded)
        memory, seconds = _memory(ledger, offloaded), None
    traffic = tuple(
        Traffic(axis, name, calls, ledger.bytes[axis, name]) for (axis, name), calls in sorted(ledger.calls.items())
    )
    left_out = [*ALWAYS_LEFT_OUT]
    if sizes.ep > 1 and asked.step.expert_load == 1:
        left_out.append("uneven routes: each token chooses among all experts alike (see expert_load)")
    if resolved.compile is not None:
        left_out.append("torch.compile: the step is traced eagerly")
    if offloaded:
        left_out.append("copies between host and device")
    if asked.step.optimizer == "whole-matrix":
        left_out.append("what the step of a matrix computes, makes and keeps")
    if muon and any(len(parameter.shape) == 3 for _, parameter in found.tree.parameters.values()):
        left_out.append(
            "stacks of matrices are stepped one by one: a CUDA device steps one as a batch, which takes more memory"
        )
    return Estimate(
        asked=asked,
        sizes=sizes,
        parameters=sum(parameter.numel for _, parameter in found.tree.parameters.values()) - _tied(found),
        held=ledger.stored,
        memory=memory,
        flops=dict(sorted(ledger.flops.items())),
        traffic=traffic,
        touched=ledger.touched,
        layers=layers,
        traced=traced,
        not_modelled=tuple(left_out),
        device=device,
        bound=bound_of(device, sizes, ledger.flops, traffic, ledger.touched, ledger.overlap, seconds)
        if device is not None
        else None,
        pipeline=pipeline,
    )


def _whole_ledger(
    found: FoundModel,
    program: Program,
    asked: Question,
    *,
    offloaded: bool,
    progress: Callable[[str], None],
) -> tuple[Ledger, Depths]:
    """The ledger of a model on a mesh without stages."""
    depths = depths_of(found, program)
    ledgers = []
    for depth in depths.traced:
        layers = f", {depth} of {depths.count} layers" if depth != depths.count else ""
        progress(f"tracing {program.resolved.sizes.text() or 'one device'}{layers}")
        shorten = partial(cut, depths=depths, depth=depth)
        ledgers.append(step_ledger(found, program, asked, offloaded=offloaded, shorten=shorten))
    return whole(ledgers, depths), depths


def _memory(ledger: Ledger, offloaded: bool) -> Memory:
    """The memory at the place with the largest sum, and the maximum of each category anywhere."""
    away = OFFLOADED if offloaded else ()

    def here(amounts: Bytes) -> dict[Category, int]:
        return {category: size for category, size in amounts.items() if category not in away and size}

    (phase, module), moment = max(ledger.moments.items(), key=lambda item: sum(here(item[1].peak).values()))
    most: dict[Category, int] = {}
    for one in ledger.moments.values():
        for category, size in one.most.items():
            most[category] = max(most.get(category, 0), size)
    host = {category: size for category, size in most.items() if category in away}
    return Memory(here(moment.peak), phase, module, here(most), host)


def _tied(found: FoundModel) -> int:
    """The number of elements of parameters that are second names of others."""
    return sum(found.tree.parameters[name][1].numel for group in found.tree.tied for name in group[1:])
