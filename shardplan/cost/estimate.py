"""One mesh: a program applied to the cut model, traced, and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from shardplan.compiler.lower.program import Program
from shardplan.core.estimates import OFFLOADED, Category, Device, Estimate, Memory, Question, Traffic, TrainingStep
from shardplan.model.config_numbers import config_value, text_config
from shardplan.model.found import FoundModel
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.parallel.expert_routes import LOAD
from shardplan.styles.backends import BACKENDS
from shardplan.torchlib.gathering import without_advice

from .depth import cut, depths_of, restricted, whole
from .fake_rank import fake_mesh
from .least_time import bound_of
from .ledger import Bytes, Ledger
from .step_inputs import inputs_of
from .traced_step import trace

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
        program: compiled for the mesh.
        progress: receives a text for each stage.

    Raises:
        PlanError: SP560.
        ValueError: a data-parallel backend other than fsdp2; data-parallel ranks, and no such section in the plan; a
            dtype that the device has no speed for; a process group exists.
    """
    resolved = program.resolved
    sizes, section = resolved.sizes, resolved.data_parallel
    if section is not None and not BACKENDS[section.backend].traceable:
        known = ", ".join(name for name, backend in BACKENDS.items() if backend.traceable)
        raise ValueError(f"estimate supports the data-parallel backend {known}, not {section.backend}")
    offloaded = section is not None and bool(section.cpu_offload)
    depths = depths_of(found, program)
    ledgers = []
    for depth in depths.traced:
        layers = f", {depth} of {depths.count} layers" if depth != depths.count else ""
        progress(f"tracing {sizes.text() or 'one device'}{layers}")
        shorten = partial(cut, depths=depths, depth=depth)
        ledgers.append(step_ledger(found, program, asked, offloaded=offloaded, shorten=shorten))
    ledger = whole(ledgers, depths)
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
    return Estimate(
        asked=asked,
        sizes=sizes,
        parameters=sum(parameter.numel for _, parameter in found.tree.parameters.values()) - _tied(found),
        held=ledger.stored,
        memory=_memory(ledger, offloaded),
        flops=dict(sorted(ledger.flops.items())),
        traffic=traffic,
        touched=ledger.touched,
        layers=depths.count,
        traced=depths.traced,
        not_modelled=tuple(left_out),
        device=device,
        bound=bound_of(device, sizes, ledger.flops, traffic, ledger.touched) if device is not None else None,
    )


def step_ledger(
    found: FoundModel,
    program: Program,
    asked: Question,
    *,
    offloaded: bool = False,
    shorten: Callable[[nn.Module], None] = lambda model: None,
) -> Ledger:
    """The measured step of a model, at its whole depth or at a smaller one.

    Args:
        offloaded: parameters and optimizer state are in the host's memory.
        shorten: removes layers.
    """
    model = found.build("meta", DTYPES[asked.step.precision]).train()
    shorten(model)
    with fake_mesh(program.resolved.sizes) as mesh, without_advice(), _loaded(asked.step, program):
        mesh.check_sections(program.resolved)
        applied = apply_program(model, mesh, restricted(program, model), src_data_rank=None)
        return trace(
            applied,
            mesh,
            inputs_of(found, model, asked.step.micro_batch, asked.step.seq_len),
            optimizer=asked.step.optimizer,
            logits=_logits(found, asked, program.resolved.sizes.tp or 1),
            offloaded=offloaded,
            name=found.name,
        )


@contextmanager
def _loaded(step: TrainingStep, program: Program) -> Iterator[None]:
    """While it lasts, this rank is the busiest one with experts."""
    token = LOAD.set(min(step.expert_load, program.resolved.sizes.ep))  # of fewer ranks in a sweep: one has all rows
    try:
        yield
    finally:
        LOAD.reset(token)


def _logits(found: FoundModel, asked: Question, tp: int) -> list[tuple[int, int]]:
    """(elements, last dim) of tensors over tokens and vocabulary: whole or split, for every token or all but the last of
    each sequence."""
    rows = config_value(text_config(found.config), "vocab_size") if found.config is not None else None
    if not isinstance(rows, int):
        return []
    tokens = [asked.step.micro_batch * length for length in (asked.step.seq_len, asked.step.seq_len - 1)]
    return [(n * width, width) for n in tokens for width in (rows, -(-rows // tp))]


def _memory(ledger: Ledger, offloaded: bool) -> Memory:
    """The place with the largest sum; the most of each category anywhere."""
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
    """Elements of parameters that are another one under a second name."""
    return sum(found.tree.parameters[name][1].numel for group in found.tree.tied for name in group[1:])
