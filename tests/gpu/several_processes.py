"""Each rank as a process, all on one device, their collectives through the host: `python -m tests.gpu.several_processes cuda`. First
which collectives gloo carries out on tensors of that device itself."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from tests.processes import RanksFailed, on_ranks

from .cases import Case, all_cases
from .rank_calls import COLLECTIVES, collective, row_of_rank
from .rows import attempt, emit


def probe(device: str) -> None:
    """Whether each collective works, a row."""
    for name in COLLECTIVES:
        try:
            on_ranks(2, collective, name, device, seconds=60.0)
            emit(case=f"gloo, {name}", works=True)
        except RanksFailed as error:
            emit(case=f"gloo, {name}", works=False, error=str(error).strip().splitlines()[-1][:300])


def on_processes(case: Case, device: str) -> dict[str, Any]:
    rows = on_ranks(case.ranks, row_of_rank, case, device, seconds=180.0 if case.compiled else 90.0)
    rank = max(range(len(rows)), key=lambda i: rows[i]["of the limit"])
    return {**rows[rank], "rank": rank, "ranks": len(rows)}


def main() -> None:
    device = sys.argv[1]
    probe(device)
    for case in all_cases():
        attempt(case.words, partial(on_processes, case, device))


if __name__ == "__main__":
    main()
