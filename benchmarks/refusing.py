"""What it takes to refuse a plan: `python -m benchmarks.refusing [--slowest N] [case ...]`.

Each case of tests/cases/err whose layouts are checked is validated in this process, and the slowest are printed:
processor seconds after imports, the part for searching a change that would fix the plan, and how many changes it tried.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402

from shardplan.compiler.layout import layout_check, model  # noqa: E402
from shardplan.compiler.layout.solver import block_rules  # noqa: E402
from shardplan.core.search_bounds import BOUNDS  # noqa: E402
from tests.case_tree import cases, run_case  # noqa: E402

SECTION = """## Refusing

`python -m benchmarks.refusing`: processor seconds of `validate` after imports for the slowest {slowest} of the {count} wrong
plans in tests/cases whose layouts are checked; of these the seconds of the search for a change that fixes the plan, and how many it tried
(at most {tries} and {seconds:.0f} s, and {drafts} and {solving:.0f} s for the solver's runs, which are counted too). The median over all is {median:.1f} s.
"""


class Counted(layout_check.Search):
    """Notes every search of a case, the solver's too."""

    made: list[Counted] = []  # noqa: RUF012

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.whole = self.tries, self.seconds
        if self.tries:
            self.made.append(self)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--slowest", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole = layout_check.Search()
    rows = []
    with_counting()
    for case in cases():
        if case.code is None or (args.cases and case.path.stem not in args.cases) or "validate" not in case.command:
            continue
        Counted.made.clear()
        start = time.process_time()
        run_case(case)
        seconds = time.process_time() - start
        if Counted.made or args.cases:
            tried = sum(one.whole[0] - one.tries for one in Counted.made)
            searching = sum(one.whole[1] - one.seconds for one in Counted.made)
            rows.append((seconds, searching, tried, case.path.stem))
    rows.sort(reverse=True)
    median = rows[len(rows) // 2][0] if rows else 0.0
    print(
        SECTION.format(
            slowest=min(args.slowest, len(rows)),
            count=len(rows),
            tries=whole.tries,
            seconds=whole.seconds,
            drafts=BOUNDS.help_drafts,
            solving=BOUNDS.help_seconds,
            median=median,
        )
    )
    print("| case | s | searching | tried |\n|---|---|---|---|")
    for seconds, searching, tried, name in rows[: args.slowest]:
        print(f"| {name} | {seconds:.1f} | {searching:.1f} | {tried} |", flush=True)


def with_counting() -> None:
    """Count the searches of every check that follows."""
    layout_check.Search = model.Search = block_rules.Search = Counted


if __name__ == "__main__":
    main()
