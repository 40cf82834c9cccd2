"""Times of a step, and layers of Llama-3.1-8B as one of so many ranks has them: a process group that sends nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardplan
from benchmarks.ways import SHAPES, fake_ranks, fresh, llama

DEPTHS = (1, 3)
LARGE = {**SHAPES["8B"], "num_key_value_heads": 8}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}


def shape_of(device: str) -> dict[str, int]:
    """Of the layer: on a CPU, a small one."""
    return LARGE if device == "cuda" else SMALL


@dataclass(frozen=True)
class Times:
    """Milliseconds of a forward and backward.

    Args:
        host: from the call to its return, while the device was idle before it.
        step: of the device, from its first kernel to its last; of a CPU what the host takes.
        kernels: the sum over the kernels.
    """

    host: float
    step: float
    kernels: float

    def per_layer(self, fewer: Times) -> Times:
        layers = DEPTHS[1] - DEPTHS[0]
        names = ("host", "step", "kernels")
        return Times(*((getattr(self, name) - getattr(fewer, name)) / layers for name in names))


@contextmanager
def planned(tp: int, device: str, **options: Any) -> Iterator[list[nn.Module]]:
    """Llamas of each depth in bfloat16 as rank 0 of tp ranks has them, while the context lasts."""
    plan = {"data_parallel": False, "logits": "replicated", "prove": False, **options}
    with fake_ranks(tp, device=device) as mesh:
        models = []
        for depth in DEPTHS:
            config = llama(depth, **shape_of(device))
            config.dtype = torch.bfloat16
            with torch.device(device):
                model = fresh(config).to(torch.bfloat16).train()
            models.append(shardplan.apply_plan(model, mesh, "llama", src_data_rank=None, **plan))
        yield models


def layer_times(models: Sequence[nn.Module], tokens: int, device: str, repeats: int) -> Times:
    """Of one layer: the difference between the depths."""
    fewer, more = (times_of(step_of(model, tokens, device), device, repeats) for model in models)
    return more.per_layer(fewer)


def step_of(model: nn.Module, tokens: int, device: str) -> Callable[[], None]:
    ids = torch.randint(0, 1024, (1, tokens), device=device)
    positions = torch.arange(tokens, device=device)[None]

    def step() -> None:
        model(input_ids=ids, position_ids=positions).logits.float().mean().backward()
        model.zero_grad()

    return step


def times_of(step: Callable[[], None], device: str, repeats: int) -> Times:
    """The medians."""
    for _ in range(3):
        step()
    measure = _on_cuda if device == "cuda" else _on_cpu
    hosts, steps = zip(*(measure(step) for _ in range(repeats)), strict=True)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiled.key_averages()
    name = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return Times(statistics.median(hosts), statistics.median(steps), sum(getattr(e, name) for e in events) / 1000)


def _on_cuda(step: Callable[[], None]) -> tuple[float, float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    step()
    host = 1000 * (time.perf_counter() - start)
    end.record()
    torch.cuda.synchronize()
    return host, begin.elapsed_time(end)


def _on_cpu(step: Callable[[], None]) -> tuple[float, float]:
    start = time.perf_counter()
    step()
    taken = 1000 * (time.perf_counter() - start)
    return taken, taken
