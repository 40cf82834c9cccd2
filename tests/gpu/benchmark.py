"""A layer's step as benchmarks/gpu.py measures it, each way a row, those that compile last: `python -m tests.gpu.benchmark cuda`."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import gpu
from benchmarks.ways import Way

from .rows import attempt

REPEATS = 5


def row_of(name: str, make: Way) -> dict[str, Any]:
    step, kernels, kept, peak = gpu.layer_of(name, make, REPEATS)
    return {"step, ms": step, "kernels, ms": kernels, "kept, MiB": kept, "peak, MiB": peak}


def main() -> None:
    ways = [(name, way, make) for name in gpu.MODELS for way, make in gpu.ways(name).items()]
    for name, way, make in sorted(ways, key=lambda entry: entry[1].endswith("compiled")):
        attempt(f"{name}, {way}", partial(row_of, name, make))


if __name__ == "__main__":
    main()
