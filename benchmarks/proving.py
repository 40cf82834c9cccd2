"""What the proof costs in `validate`: `python -m benchmarks.proving [--repeats N] [TYPE ...]`.

Without types, one for each built-in plan: half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from .page import table

TYPES = Path(__file__).parents[1] / "docs" / "model-types.json"
SHOWN = 12  # of the plans with the largest ratios
SECTION = """## The proof

`python -m benchmarks.proving{types}`: processor time of `validate TYPE auto --tp 2`, both variants, over importing torch,
transformers and the package and building the model on the meta device; with the numeric proof and without it (`--no-proof`).
A process for each plan, which takes the time at each of the three ends: what comes before is the same. {count} of {all} built-in
plans: with the proof the median of the ratios is {median:.2f} (goal 1.6), the largest {worst:.2f} (goal 3); without it {without:.2f}.
The largest:
"""
# As `validate`, for the nearest configuration to a type's default that can be built. Prints the processor time at three ends.
VALIDATE = """
import sys
from time import process_time
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.automatic import auto_plan
from shardplan.compiler.user_inputs import Model
from shardplan.compiler.variants import wanted_variants
from shardplan.core.mesh import MeshSizes
from shardplan.proof.prove import compile_for
from shardplan.proof.stage import Question, prove_stage
from tests.model_settings import find
found = find(sys.argv[1])
built = process_time()
plan = auto_plan(found.tree).plan
reduced, wanted = ModelLayouts(found, 2), wanted_variants(plan, None, MeshSizes(tp=2))
compile_for(reduced, plan, MeshSizes(tp=2), wanted)
typed = process_time()
prove_stage(Question(reduced, Model(sys.argv[1]), plan), wanted)
print("seconds", built, typed, process_time())
"""


def one_of_each_plan() -> list[str]:
    """A model type for each built-in plan that is right at tp 2."""
    known = {
        row["plan"]: row["name"]
        for row in json.loads(TYPES.read_text("utf-8"))
        if row["verdicts"].get("tp2") == "right"
    }
    return sorted(known.values())


def measured(name: str) -> tuple[float, float, float]:
    """Seconds of processor time: when the model was built, when the layouts were proven, at the end.

    Raises:
        RuntimeError: the process failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", VALIDATE, name]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr}")
    *_, last = ended.stdout.splitlines()
    built, typed, proven = map(float, last.split()[1:])
    return built, typed, proven


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    rows = []
    for name in args.types or one_of_each_plan():
        runs = [measured(name) for _ in range(args.repeats)]
        layouts, proof = (statistics.median(run[at] / run[0] for run in runs) for at in (1, 2))
        rows.append((name, layouts, proof))
        print(f"{name} {layouts:.2f} {proof:.2f}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -row[2])
    facts = {
        "types": "".join(f" {name}" for name in args.types),
        "count": len(rows),
        "all": len(one_of_each_plan()),
        "median": statistics.median(row[2] for row in rows),
        "worst": rows[0][2],
        "without": statistics.median(row[1] for row in rows),
    }
    print(SECTION.format(**facts))
    lines = [[name, f"{without:.2f}", f"{proof:.2f}"] for name, without, proof in rows[:SHOWN]]
    print(table(["type", "without the proof", "with it"], lines))


if __name__ == "__main__":
    main()
