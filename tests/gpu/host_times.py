"""From which length on the host is hidden: what it takes to launch a planned layer of Llama-3.1-8B against what the device takes to
run it: `python -m tests.gpu.host_times cuda`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from .rows import attempt, emit
from .timing import Times, layer_times, planned

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"tp": 1},
    "TP": {"tp": 8},
    "SP": {"tp": 8, "sequence_parallel": True},
    "SP, checkpointing": {"tp": 8, "sequence_parallel": True, "activation_checkpointing": {"mode": "full"}},
    "SP, regather": {"tp": 8, "sequence_parallel": True, "regather": True},
}


def of_length(
    models: Sequence[nn.Module], tokens: int, device: str, repeats: int, to: dict[int, Times]
) -> dict[str, Any]:
    to[tokens] = times = layer_times(models, tokens, device, repeats)
    return {"host, ms": times.host, "kernels, ms": times.kernels, "host / kernels": times.host / times.kernels}


def hidden_from(measured: dict[int, Times]) -> int | None:
    """The first length from which on no length takes the host longer than the device; None, where the longest does."""
    found = None
    for tokens in sorted(measured, reverse=True):
        if measured[tokens].host > measured[tokens].kernels:
            break
        found = tokens
    return found


def main() -> None:
    device = sys.argv[1]
    lengths, repeats = (LENGTHS, 10) if device == "cuda" else ((16, 32), 2)
    for name, way in WAYS.items():
        measured: dict[int, Times] = {}
        with planned(device=device, **way) as models:
            for tokens in lengths:
                call = partial(of_length, models, tokens, device, repeats, measured)
                attempt(f"{name}, {tokens:,} tokens", call)
        emit(case=f"{name}: hidden from", tokens=hidden_from(measured) or f"more than {max(lengths):,}")


if __name__ == "__main__":
    main()
