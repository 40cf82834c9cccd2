"""What the proof costs in `validate`: `python -m benchmarks.proving [--share N --seed S] [--repeats N] [TYPE ...]`.

Without types, one for each built-in plan, or a share of them: hours for all of them, so rather with a share.
"""

from __future__ import annotations

import argparse
import compileall
import json
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

import shardplan
from shardplan import validate
from shardplan.compiler.user_inputs import FoundOnce
from tests.model_settings import find
from tests.mutants.asked import in_process

from .page import table

TYPES = Path(__file__).parents[1] / "reports" / "model-types.json"
SHOWN = 3  # of the types with the largest ratios, for each mesh
GOALS = {"tp": (1.4, 3.0), "ep": (2.0, 4.0), "pp": (2.0, 4.0)}  # the median, the worst
SECTION = """## The proof

`python -m benchmarks.proving{words}`: processor time of `validate TYPE auto` with the numeric proof, all variants of the plan, over that of
the same process that only imports torch, transformers and the package and builds the model on the meta device; and without the
proof (`--no-proof`). A process for each plan and mesh, forked after the imports, whose time counts: what comes before is the same. The package is
compiled to bytecode before, as pip does. {count} of
{all} built-in plans; those with experts that ranks share have the meshes with ep as well.
"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh that plans are validated on; `goal` names its row of GOALS."""

    sizes: dict[str, int]
    goal: str

    @property
    def shown(self) -> str:
        return " ".join(f"--{axis.replace('_', '-')} {size}" for axis, size in self.sizes.items())


MESHES = (
    Mesh({"tp": 2}, "tp"),
    Mesh({"tp": 4}, "tp"),
    Mesh({"dp_shard": 2, "tp": 2}, "tp"),
    Mesh({"tp": 2, "ep": 2}, "ep"),
    Mesh({"dp_shard": 2, "ep": 2}, "ep"),
    Mesh({"pp": 2}, "pp"),
    Mesh({"pp": 2, "tp": 2}, "pp"),
)


def one_of_each_plan() -> dict[str, bool]:
    """A model type for each built-in plan that is right at tp 2; whether ranks share its experts."""
    known: dict[str, tuple[str, bool]] = {
        row["plan"]: (row["name"], row["experts"] == "right")
        for row in json.loads(TYPES.read_text("utf-8"))
        if row["verdicts"].get("tp2") == "right"
    }
    return dict(sorted(known.values()))


def measured(name: str, mesh: Mesh, proof: bool, imported: float, plan: Any = "auto") -> tuple[float, str]:
    """The ratio, and the codes of what was found; in a process forked from this one, which has imported and built nothing more.

    Args:
        imported: processor seconds of this process for its imports.

    Raises:
        RuntimeError: the process failed.
    """

    def validated() -> tuple[float, float, list[str]]:
        class Built(FoundOnce):
            _found = find(name)

        built = process_time()
        report = validate(Built(name), plan, mesh.sizes, proof=proof)
        return built, process_time(), sorted({found.code for found in report.diagnostics if found.is_error})

    built, whole, codes = in_process(validated)
    return (imported + whole) / (imported + built), " ".join(codes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, metavar="N", help="one in N of the plans")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn by")
    parser.add_argument(
        "--bfloat16", action="store_true", help="with `mixed_precision`: the proof runs once more in bfloat16"
    )
    parser.add_argument("--mesh", nargs="*", choices=GOALS, default=list(GOALS), help="with which axis")
    args = parser.parse_args()
    known, plans = one_of_each_plan(), {row["name"]: row["plan"] for row in json.loads(TYPES.read_text("utf-8"))}
    half = {
        "version": "1",
        "name": "half",
        "data_parallel": {"mixed_precision": {"param": "bfloat16", "reduce": "float32"}},
    }
    drawn = sorted(random.Random(args.seed).sample(sorted(known), max(1, len(known) // args.share)))
    names = args.types or drawn
    given = " --bfloat16" if args.bfloat16 else ""
    words = f" --share {args.share} --seed {args.seed}" if args.share > 1 else ""
    print(
        SECTION.format(
            words=("".join(f" {name}" for name in args.types) or words) + given, count=len(names), all=len(known)
        )
    )
    torch.set_num_threads(1)
    (package,) = shardplan.__path__
    compileall.compile_dir(package, quiet=1)
    summary, worst, imported = [], [], process_time()
    for mesh in (one for one in MESHES if one.goal in args.mesh):
        rows: list[tuple[float, float, str, str]] = []
        for name in (one for one in names if mesh.goal != "ep" or known.get(one, True)):
            ratios: dict[bool, float] = {}
            for proof in (False, True):
                plan = {**half, "extends": plans[name]} if args.bfloat16 else "auto"
                runs = [measured(name, mesh, proof, imported, plan) for _ in range(args.repeats)]
                ratios[proof], codes = statistics.median(ratio for ratio, _ in runs), runs[0][1]
            rows.append((ratios[True], ratios[False], name, codes))
            print(f"{mesh.shown} {name} {ratios[False]:.2f} {ratios[True]:.2f} {codes}", file=sys.stderr, flush=True)
        if not rows:
            continue
        rows.sort(reverse=True)
        right = [row for row in rows if not row[3]]
        median = statistics.median(more for more, *_ in right or rows)
        without = statistics.median(less for _, less, *_ in right or rows)
        most, goal = rows[0][0], GOALS[mesh.goal]
        summary.append(
            [mesh.shown, len(right), f"{without:.2f}", f"{median:.2f}", f"{most:.2f}", f"{goal[0]} and {goal[1]:.0f}"]
        )
        worst += [[mesh.shown, name, f"{less:.2f}", f"{more:.2f}", codes] for more, less, name, codes in rows[:SHOWN]]
    print(
        table(["mesh", "plans that are right", "median without the proof", "with it", "the largest", "goals"], summary)
    )
    print("\nThe largest:\n")
    print(table(["mesh", "type", "without the proof", "with it", "refused with"], worst))


if __name__ == "__main__":
    main()
