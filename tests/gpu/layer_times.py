"""A layer of Llama-3.1-8B as a rank of tp ranks has it, against the least time that `estimate` says of it, without communication:
`python -m tests.gpu.layer_times cuda`. On a CPU a small layer, and what `estimate` counts of it."""

from __future__ import annotations

import sys
from typing import Any

import torch

import shardplan
from shardplan.core.estimates import Device, Estimate
from shardplan.cost.devices import known_devices

from .rows import attempt
from .timing import DEPTHS, layer_times, planned, shape_of


def known(device: str) -> Device | None:
    """The record of this device, where `estimate` has one."""
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name(0).lower()
    return next((one for word, one in known_devices().items() if word in name), None)


def estimated(tp: int, depth: int, tokens: int, device: str, sequence_parallel: bool) -> Estimate:
    settings = {**shape_of(device), "num_hidden_layers": depth, "vocab_size": 1024}
    options = {"sequence_parallel": sequence_parallel, "data_parallel": False, "logits": "replicated"}
    return shardplan.estimate(
        shardplan.Model("llama", settings=settings),
        "llama",
        {"tp": tp},
        shardplan.TrainingStep(tokens, optimizer="none"),
        **options,
    )


def layer(tp: int, sequence_parallel: bool, device: str, tokens: int, repeats: int) -> dict[str, Any]:
    guesses = [estimated(tp, depth, tokens, device, sequence_parallel) for depth in DEPTHS]
    with planned(tp, device, sequence_parallel=sequence_parallel) as models:
        times = layer_times(models, tokens, device, repeats)
    layers = DEPTHS[1] - DEPTHS[0]
    flops = sum(guesses[1].flops.values()) - sum(guesses[0].flops.values())
    touched = guesses[1].touched - guesses[0].touched
    row: dict[str, Any] = {"step, ms": times.step, "kernels, ms": times.kernels}
    row |= {"GFLOP": flops / layers / 1e9, "MB touched": touched / layers / 1e6}
    record = known(device)
    if record is None:
        return row
    compute, memory = flops / layers / record.flops["bfloat16"], touched / layers / record.memory_bandwidth
    least = 1000 * max(compute, memory)
    more = {"least, ms": least, "step / least": times.step / least, "kernels / least": times.kernels / least}
    return {**row, "of": record.name, "bound by": "compute" if compute > memory else "memory", **more}


def main() -> None:
    device = sys.argv[1]
    tokens, repeats = (8192, 10) if device == "cuda" else (64, 3)
    for tp in (1, 2, 4, 8):
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            words = f"tp {tp}{', sequence' if sequence_parallel else ''}, {tokens:,} tokens"
            attempt(words, lambda tp=tp, sp=sequence_parallel: layer(tp, sp, device, tokens, repeats))


if __name__ == "__main__":
    main()
