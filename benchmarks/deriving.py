"""What it costs to derive a plan: `python -m benchmarks.deriving [--repeats N] [TYPE ...]`."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from .page import table

TYPES = ("llama", "gpt2", "qwen3", "bert", "vit", "t5", "whisper")
SECTION = """## Deriving a plan

`python -m benchmarks.deriving`: processor seconds that `auto` takes to derive a plan at tp 2, as for a type without a built-in plan;
the tries, each a draft that runs on all ranks of the reduced model (the bound is {most:,}); and the time over importing torch,
transformers and the package and building the model on the meta device. Goal: 15 seconds. The checks and [the proof](#the-proof) come
on top, as for any plan. A plan that was derived before is read in milliseconds.
"""
# Prints the processor time when the model is built, and when the plan is there, and the tries.
DERIVE = """
import sys
from time import process_time
from shardplan.core.search_bounds import BOUNDS
from shardplan.authoring.init.new import new_plan
from tests.model_settings import find
found = find(sys.argv[1])
built = process_time()
made = new_plan(found, tp=2)
print("seconds", built, process_time(), made.tries, BOUNDS.drafts)
"""


def measured(name: str) -> tuple[float, float, int, int]:
    """Seconds of processor time when the model was built, and at the end; the tries, and their bound.

    Raises:
        RuntimeError: the process failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DERIVE, name]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr}")
    *_, last = ended.stdout.splitlines()
    _, built, derived, tries, most = last.split()
    return float(built), float(derived), int(tries), int(most)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", metavar="TYPE", default=TYPES)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    rows, most = [], 0
    for name in args.types:
        runs = [measured(name) for _ in range(args.repeats)]
        seconds = statistics.median(derived - built for built, derived, *_ in runs)
        ratio = statistics.median(derived / built for built, derived, *_ in runs)
        *_, tries, most = runs[0]
        rows.append([name, f"{seconds:.1f}", tries, f"{ratio:.2f}"])
    print(SECTION.format(most=most))
    print(table(["type", "seconds", "tries", "with import and building, over these"], rows))


if __name__ == "__main__":
    main()
