"""Each rank as a process, all on one device, over gloo: `python -m tests.gpu.several_processes cuda`. First which collectives
gloo carries out on tensors of that device."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from tests.processes import RanksFailed, on_ranks

from .cases import Case, all_cases
from .rank_calls import COLLECTIVES, collective, row_of_rank
from .rows import attempt, emit


def probe(device: str) -> set[str]:
    """The collectives that work, each a row."""
    works = set()
    for name in COLLECTIVES:
        try:
            on_ranks(2, collective, name, device, seconds=60.0)
            works.add(name)
            emit(case=f"gloo, {name}", works=True)
        except RanksFailed as error:
            emit(case=f"gloo, {name}", works=False, error=str(error).strip().splitlines()[-1][:300])
    return works


def needed(case: Case) -> set[str]:
    names = {"all_reduce", "all_gather"}
    if case.sequence_parallel:
        names.add("reduce_scatter")
    if case.data_ranks > 1:
        names.add("reduce_scatter of a mean")
    return names | ({"all_to_all"} if case.ep > 1 or case.cp > 1 else set())


def on_processes(case: Case, device: str, works: set[str]) -> dict[str, Any]:
    if lacking := needed(case) - works:
        return {"skipped": f"gloo has no {', '.join(sorted(lacking))} on {device}"}
    rows = on_ranks(case.ranks, row_of_rank, case, device, seconds=180.0 if case.compiled else 90.0)
    rank = max(range(len(rows)), key=lambda i: rows[i]["of the limit"])
    return {**rows[rank], "rank": rank, "ranks": len(rows)}


def main() -> None:
    device = sys.argv[1]
    works = probe(device)
    for case in all_cases():
        attempt(case.words, partial(on_processes, case, device, works))


if __name__ == "__main__":
    main()
