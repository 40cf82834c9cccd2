"""Each rank as a thread of one process, with torch's process group for threads: `python -m tests.gpu.one_process cuda`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import shardplan
from shardplan.compiler.lower.program import Program
from shardplan.proof.threads import rank_threads
from shardplan.runtime.apply.phases import apply_program
from shardplan.runtime.apply.plan_mesh import read_mesh

from .cases import (
    Case,
    Run,
    all_cases,
    exactly,
    judged,
    of_dtype,
    options_of,
    planned_step,
    precisions,
    references,
    stored,
    worst_of,
)
from .rows import attempt


def on_threads(case: Case, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for dtype in precisions(case):
        models = [of_dtype(case.model, stored(case, dtype), device) for _ in range(case.ranks)]
        # Here: what records a model's run changes classes, which threads share.
        program = shardplan.compile_plan(models[0], {"tp": case.tp, "ep": case.ep}, "auto", **options_of(case, dtype))
        of_rank = partial(_planned_step, case, models, program, device)

        with rank_threads(case.ranks) as on_ranks:
            runs = on_ranks(of_rank)
        exact, plain = references(case, dtype, device)
        row = worst_of([judged(case, run, exact, plain) for run in runs])
        row["compared in"] = str(exact.loss.dtype).removeprefix("torch.")
        if row["ok"]:
            break
    return row


def _planned_step(case: Case, models: Sequence[nn.Module], program: Program, device: str, rank: int) -> Run:
    mesh = shardplan.build_mesh(dp_shard=1, tp=case.tp, ep=case.ep, device_type=device)
    apply_program(models[rank], read_mesh(mesh), program, src_data_rank=None)
    return planned_step(case, models[rank], program, mesh, device)


def main() -> None:
    device = sys.argv[1]
    torch.set_num_threads(1)
    exactly()
    if device == "cuda":
        torch.cuda.set_device(0)
    for case in all_cases():
        if case.dp_shard == case.cp == 1 and not case.compiled:
            attempt(case.words, partial(on_threads, case, device))


if __name__ == "__main__":
    main()
