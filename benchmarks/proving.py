"""What the proof costs in `validate`, whole processes: `python -m benchmarks.proving [--repeats N] [TYPE ...]`.

Without types, one for each built-in plan: most of an hour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from .page import table
from .processes import Costs, in_turns

TYPES = Path(__file__).parents[1] / "docs" / "model-types.json"
SHOWN = 12  # of the plans with the largest ratios
SECTION = """## The proof

`python -m benchmarks.proving{types}`: processor time of `validate TYPE auto --tp 2`, both variants, over importing torch,
transformers and the package and building the model on the meta device; with the numeric proof and without it (`--no-proof`).
Whole processes in turns, {repeats} times, medians. {count} built-in plans: with the proof the median of the ratios is
{median:.2f} (goal 1.6), the largest {worst:.2f} (goal 3); without it {without:.2f}. The largest:
"""
BUILD = """
import sys
from tests.model_settings import find
find(sys.argv[1])
"""
# As `validate`, for the nearest configuration to a type's default that can be built, and whatever its dropout is.
VALIDATE = """
import sys
from shardplan.compiler.user_inputs import Model, auto_plan
from shardplan.compiler.variants import wanted_variants
from shardplan.core.mesh import MeshSizes
from shardplan.compiler.layout import ModelLayouts
from shardplan.proof.prove import compile_for
from shardplan.proof.stage import Question, prove_stage
from tests.model_settings import find
found = find(sys.argv[1])
plan = auto_plan(found.tree).plan
small, wanted = ModelLayouts(found, 2), wanted_variants(plan, None)
compile_for(small, plan, MeshSizes(tp=2), wanted)
if "--no-proof" not in sys.argv:
    prove_stage(Question(small, Model(sys.argv[1]), plan), wanted)
"""


def one_of_each_plan() -> list[str]:
    """A model type for each built-in plan that is right at tp 2."""
    known = {
        row["plan"]: row["name"]
        for row in json.loads(TYPES.read_text("utf-8"))
        if row["verdicts"].get("tp2") == "right"
    }
    return sorted(known.values())


def ratio(measured: Costs, base: Costs) -> float:
    return statistics.median(measured.cpu) / statistics.median(base.cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    args = parser.parse_args()
    rows = []
    for name in args.types or one_of_each_plan():
        commands = {
            "build": ["-c", BUILD, name],
            "layouts": ["-c", VALIDATE, name, "--no-proof"],
            "proof": ["-c", VALIDATE, name],
        }
        costs = in_turns(commands, args.repeats)
        rows.append((name, ratio(costs["layouts"], costs["build"]), ratio(costs["proof"], costs["build"])))
        print(f"{name} {rows[-1][1]:.2f} {rows[-1][2]:.2f}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: -row[2])
    facts = {
        "types": "".join(f" {name}" for name in args.types),
        "repeats": args.repeats,
        "count": len(rows),
        "median": statistics.median(row[2] for row in rows),
        "worst": rows[0][2],
        "without": statistics.median(row[1] for row in rows),
    }
    print(SECTION.format(**facts))
    lines = [[name, f"{without:.2f}", f"{proof:.2f}"] for name, without, proof in rows[:SHOWN]]
    print(table(["type", "without the proof", "with it"], lines))


if __name__ == "__main__":
    main()
