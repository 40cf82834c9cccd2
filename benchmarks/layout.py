"""What the layout check costs, after imports, and what reading letters off a run would: `python -m benchmarks.layout [plan ...]`.

Each line: making the reduced model, its unsharded recorded run, the check of a right plan without and with its overlay, in
milliseconds of wall time, and how often longer a run with real moves takes; the medians of five.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402

from shardplan.compiler.layout import RecordedModel, check_layout  # noqa: E402
from shardplan.model import find_model, tree_of  # noqa: E402
from shardplan.model.reduced.reduced_model import make_reduced_model  # noqa: E402
from shardplan.proof.first_difference import first_difference  # noqa: E402
from shardplan.proof.threads import rank_threads  # noqa: E402
from tests.planned_run import planned_run  # noqa: E402

REPEATS = 5
PLANS = "gemma3 gemma3_text gpt2 llama mistral mixtral phi3 qwen2 qwen3 qwen3_moe".split()
SECTION = """## The layout check

`python -m benchmarks.layout`: milliseconds of wall time after imports, median of five, tp 2: making the reduced model, its
unsharded recorded run, and the check of the right plan without and with its overlay. A validation of both variants pays all
four once. In brackets, how many times as long as the check a run takes that reads the letters off values and gradients: two steps with
real moves on all ranks, which are watched and compared with the unsharded model's (`proof/first_difference.py`), in turns with the check. A
search pays the check for each change that it tries.
"""


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def of_model(name: str) -> Iterator[str]:
    """The milliseconds of making a reduced model, and of its recorded run."""
    found = find_model(name)
    made = make_reduced_model(found, tp=2, experts_implementation="eager")
    model = made.build()
    tree, inputs = tree_of(model), made.inputs()
    for call in (lambda: make_reduced_model(found, tp=2).build(), lambda: RecordedModel(model, inputs, tree)):
        yield f"{1000 * statistics.median(seconds(call) for _ in range(REPEATS)):.0f}"


def against_a_run(name: str, sequence_parallel: bool) -> str:
    """The milliseconds of a check, and how many times as long a run takes that reads letters off."""
    subject, program, run = planned_run(name, sequence_parallel=sequence_parallel)
    recorded = subject.recorded_for(program.resolved)[:1]
    with rank_threads(2) as on_ranks:
        pairs = [
            (
                seconds(lambda: check_layout(program.resolved, recorded)),
                seconds(lambda: first_difference(run, program, on_ranks)),
            )
            for _ in range(REPEATS)
        ]
    ratio = statistics.median(read / checked for checked, read in pairs)
    return f"{1000 * statistics.median(checked for checked, _ in pairs):.0f} ({ratio:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plans", nargs="*")
    torch.set_num_threads(2)
    print(SECTION)
    print("| plan | copy | unsharded run | tensor parallel | sequence parallel |\n|---|---|---|---|---|")
    for name in parser.parse_args().plans or PLANS:
        cells = (name, *of_model(name), *(against_a_run(name, on) for on in (False, True)))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
