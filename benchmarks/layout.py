"""What the layout check costs, after imports: `python -m benchmarks.layout [--tp N] [plan ...]`.

Each line: making the reduced model, its unsharded recorded run, the check of a right plan without and with its overlay; in
milliseconds of wall time, the median of five.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

from shardplan.core.plan import overlays_of

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402

from shardplan.compiler.bind import bind  # noqa: E402
from shardplan.compiler.layout import RecordedModel, check_layout  # noqa: E402
from shardplan.core.mesh import MeshSizes  # noqa: E402
from shardplan.language import parse_plan  # noqa: E402
from shardplan.model import find_model, tree_of  # noqa: E402
from shardplan.model.reduced import make_reduced_model  # noqa: E402

REPEATS = 5
PLANS = "gemma3 gemma3_text gpt2 llama mistral mixtral phi3 qwen2 qwen3 qwen3_moe".split()
SECTION = """## The layout check

`python -m benchmarks.layout`: milliseconds of wall time after imports, median of five, tp {tp}: making the reduced model, its
unsharded recorded run, and the check of the right plan without and with its overlay. A validation of both variants pays all
four once.
"""


def milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plans", nargs="*")
    parser.add_argument("--tp", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(2)
    print(SECTION.format(tp=args.tp))
    print("| plan | copy | unsharded run | tensor parallel | sequence parallel |\n|---|---|---|---|---|")
    for name in args.plans or PLANS:
        plan = parse_plan(name).plan
        found = find_model(plan.models[0])
        reduced_model = make_reduced_model(found, tp=args.tp, experts_implementation="eager")
        model = reduced_model.build()
        tree = tree_of(model)
        recorded = RecordedModel(model, reduced_model.inputs(), tree)
        bound = [bind(plan, tree, MeshSizes(tp=args.tp), overlays_of(on))[0] for on in (False, True)]
        numbers = [
            milliseconds(lambda found=found: make_reduced_model(found, tp=args.tp).build()),
            milliseconds(
                lambda model=model, reduced_model=reduced_model, tree=tree: RecordedModel(
                    model, reduced_model.inputs(), tree
                )
            ),
            *(milliseconds(lambda one=one, recorded=recorded: check_layout(one, [recorded])) for one in bound),
        ]
        print(f"| {name} | " + " | ".join(f"{number:.0f}" for number in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
