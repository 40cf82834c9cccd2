"""The estimated peaks of pipeline stages against the allocator's own account of a real run: `python -m benchmarks.stage_memory`.

As `benchmarks.memory`, with two stages in gloo processes; each pp rank is compared, since they hold different things.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

import shardplan
from shardplan.model import find_any

from .memory import LLAMA, STEP, Step, peaks_of_steps
from .page import table
from .processes import on_processes

SECTION = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}
SETTINGS = LLAMA | {"num_hidden_layers": 8}
SEQ, STEPS = 128, 3  # without collectives over replicas, no thread of gloo holds anything: each step has the same peak
TEXT = """## The estimated peaks of pipeline stages

`python -m benchmarks.stage_memory`: as above, for each pp rank of a pipeline: a Llama of 8 blocks on 2 gloo processes, micro-batches of 2 x 128 tokens.
"""


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Args:
        mesh: axis -> size.
        options: arguments of `estimate` and `apply_plan` alike.
        micro_batch: sequences.
    """

    schedule: str
    micro_batches: int
    mesh: Mapping[str, int] = field(default_factory=lambda: {"pp": 2, "tp": 1})
    options: Mapping[str, Any] = field(default_factory=lambda: {"data_parallel": False})
    micro_batch: int = 2

    @property
    def ranks(self) -> int:
        return self.mesh["pp"] * self.mesh["tp"] * self.mesh.get("dp_shard", 1)


CASES = {
    f"{schedule}, {count} micro-batches": Case(schedule, count)
    for schedule, count in (("gpipe", 4), ("1f1b", 4), ("1f1b", 8), ("interleaved", 4))
}


def measured_peak(case: Case) -> int:
    """On a rank of a process group: the most bytes of a step that is not the first."""
    mesh = shardplan.build_mesh(**case.mesh, device_type="cpu")
    found = find_any("llama", settings=SETTINGS, trust_remote_code=False, inputs=None)

    def made() -> tuple[tuple[()], Step]:
        pipeline = shardplan.apply_plan(
            found.build("cpu").train(),
            mesh,
            "auto",
            pipeline=shardplan.PipelineOptions(case.schedule, case.micro_batches),
            seq_len=SEQ,
            src_data_rank=None,
            prove=False,
            check_inputs=False,
            pipeline_parallel=SECTION,
            **case.options,
        )
        optimizer = torch.optim.AdamW(pipeline.parameters())

        def step() -> None:
            torch.manual_seed(0)  # the ranks of a pipeline have one batch
            ids = torch.randint(SETTINGS["vocab_size"], (case.micro_batch * case.micro_batches, SEQ))
            with record_function(STEP):
                pipeline.step(input_ids=ids, labels=ids)
                optimizer.step()
                pipeline.zero_grad()

        return (), step

    return min(peaks_of_steps(made, STEPS)[1:])


def estimated_peaks(case: Case) -> tuple[int, ...]:
    """The peak of each pp rank."""
    estimate = shardplan.estimate(
        shardplan.Model("llama", settings=SETTINGS),
        "auto",
        case.mesh,
        shardplan.TrainingStep(
            SEQ,
            micro_batch=case.micro_batch,
            precision="fp32",
            optimizer="adamw-for-loop",
            micro_batches=case.micro_batches,
            schedule=case.schedule,
        ),
        pipeline_parallel=SECTION,
        **case.options,
    )
    assert estimate.pipeline is not None
    return estimate.pipeline.peaks


def rank(index: int, ranks: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=index, world_size=ranks)
    peaks = torch.tensor([measured_peak(CASES[name]) for name in names])
    every = [torch.empty_like(peaks) for _ in range(ranks)]
    dist.all_gather(every, peaks)
    if index == 0:
        torch.save(torch.stack(every), Path(folder, "peaks"))
    dist.destroy_process_group()


def measured(names: list[str]) -> dict[str, list[int]]:
    """The peak of each pp rank, for cases of one number of ranks, in processes of their own."""
    (ranks,) = {CASES[name].ranks for name in names}
    with tempfile.TemporaryDirectory() as folder:
        on_processes(rank, (ranks, names, folder), ranks)
        peaks = (
            torch.load(Path(folder, "peaks")).view(2, -1, len(names)).amin(1)
        )  # of equal shards, as benchmarks.memory
    return dict(zip(names, peaks.T.tolist(), strict=True))


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for ranks in sorted({case.ranks for case in CASES.values()}):
        for name, peaks in measured([name for name, case in CASES.items() if case.ranks == ranks]).items():
            for pp, (guess, peak) in enumerate(zip(estimated_peaks(CASES[name]), peaks, strict=True)):
                rows.append((name, pp, f"{peak:,}", f"{guess:,}", "0.98 to 1.02", f"{guess / peak:.4f}"))
    print(TEXT)
    print(table(("case", "pp rank", "allocator", "estimate", "goal", "estimate / allocator"), rows))


if __name__ == "__main__":
    main()
