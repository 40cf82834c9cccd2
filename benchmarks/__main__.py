"""Run benchmarks and write their sections into their pages: `python -m benchmarks [name ...]`.

Each is a module of this folder that prints its section; `python -m benchmarks.NAME` runs one and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from .page import write_section

# In the order of the page. Those that need a CUDA device are asked for by name (`python -m benchmarks gpu`).
CPU = (
    "collectives",
    "plans",
    "kept",
    "copies",
    "memory",
    "fused",
    "stage_memory",
    "host",
    "bare",
    "overlap",
    "states",
    "watching",
    "steps",
    "startup",
    "growth",
    "applying",
    "layout",
    "refusing",
    "proving",
    "experts",
    "deriving",
    "loading",
    "pipelines",
    "optimizers",
    "refit",
    "published",
)
GPU = ("gpu",)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", choices=[[], *CPU, *GPU], help=f"{', '.join((*CPU, *GPU))} (all of the CPU)"
    )
    for name in parser.parse_args().names or CPU:
        start = time.monotonic()
        print(f"{name} ...", file=sys.stderr, end=" ", flush=True)
        run = [sys.executable, "-m", f"benchmarks.{name}"]
        made = subprocess.run(run, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if made.returncode:
            raise SystemExit(f"{' '.join(run[1:])} failed with {made.returncode}")
        write_section(name, made.stdout)
        print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
