"""Schedules in closed form against real ones: `python -m benchmarks.pipelines`."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardplan
from shardplan.cost.pipeline_time import step_seconds

from .page import table
from .processes import on_processes

RANKS, MICRO_BATCHES, SEQ, TURNS = 2, 4, 256, 5
APART = 0.05  # steps that differ by less are no order that a measurement could confirm
CONFIG = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": SEQ,
}
SECTION = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}
# What runs: (schedule, how many blocks each stage has).
RUNS = [("gpipe", [4, 4]), ("1f1b", [4, 4]), ("gpipe", [5, 3]), ("1f1b", [5, 3]), ("interleaved", [2, 2, 3, 1])]
BASE = 3
TEXT = """## Schedules of a pipeline

`python -m benchmarks.pipelines`: a step of a Llama of 8 blocks on {ranks} gloo processes, {micro} micro-batches of {seq} tokens, the median of {turns} turns, over that of
1F1B with 5 and 3 blocks in the same turn; next to it the same as `estimate` computes it, in closed form, with what a block and the head take in these processes. The head took {head:.1f} times what a block takes.
"""


def measured(work: Callable[[], Any], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def seconds_of(module: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], width: int) -> float:
    """A forward and a backward."""

    def step() -> None:
        module(torch.randn(1, SEQ, width, requires_grad=True)).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return measured(step)


def together(one: float) -> float:
    """The mean over the ranks."""
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, one)
    return statistics.mean(every)


def rank(index: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=index, world_size=RANKS)
    mesh = shardplan.build_mesh(pp=RANKS, tp=1, device_type="cpu")
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG)
    whole = LlamaForCausalLM(config)
    table_of = whole.model.rotary_emb(torch.zeros(1, SEQ, config.hidden_size), torch.arange(SEQ)[None])
    block = whole.model.layers[0]
    ids = torch.randint(config.vocab_size, (1, SEQ))

    def head(x: Tensor) -> Tensor:
        logits = whole.lm_head(whole.model.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    weights = [*block.parameters()], [*whole.model.norm.parameters(), *whole.lm_head.parameters()]

    def look() -> tuple[float, float]:
        dist.barrier()
        of_block = seconds_of(lambda x: block(x, position_embeddings=table_of), weights[0], config.hidden_size)
        dist.barrier()
        return together(of_block), together(seconds_of(head, weights[1], config.hidden_size))

    before = look()
    pipelines = []
    for name, sizes in RUNS:
        pipeline = shardplan.apply_plan(
            LlamaForCausalLM(config),
            mesh,
            "llama",
            pipeline=shardplan.PipelineOptions(name, MICRO_BATCHES),
            seq_len=SEQ,
            prove=False,
            check_inputs=False,
            pipeline_parallel=SECTION | {"sizes": sizes},
        )
        pipelines.append(pipeline)
    batch = torch.randint(config.vocab_size, (MICRO_BATCHES, SEQ))
    real: list[list[float]] = [[] for _ in pipelines]
    for turn in range(TURNS + 1):
        pairs = list(zip(real, pipelines, strict=True))
        for times, pipeline in pairs if turn % 2 else reversed(pairs):  # so that a machine that slows down favours none
            pipeline.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(input_ids=batch, labels=batch)
            dist.barrier()
            if turn:
                times.append(time.perf_counter() - start)
    after = look()
    if index == 0:
        of_block, of_head = map(statistics.mean, zip(before, after, strict=True))
        Path(folder, "made").write_text(json.dumps([of_block, of_head, real]), "utf-8")
    dist.destroy_process_group()


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        on_processes(rank, (folder,), RANKS)
        of_block, of_head, real = json.loads(Path(folder, "made").read_text("utf-8"))
    closed = []
    for _, sizes in RUNS:
        stages = [of_block * blocks for blocks in sizes]
        stages[-1] += of_head
        closed.append(step_seconds([sum(stages[r::RANKS]) for r in range(RANKS)], MICRO_BATCHES, len(sizes) // RANKS))
    ratios = [statistics.median(a / b for a, b in zip(one, real[BASE], strict=True)) for one in real]
    rows = [
        [name, ", ".join(map(str, sizes)), f"{seconds / closed[BASE]:.2f}", f"{ratio:.2f}"]
        for (name, sizes), seconds, ratio in zip(RUNS, closed, ratios, strict=True)
    ]
    print(TEXT.format(ranks=RANKS, micro=MICRO_BATCHES, seq=SEQ, turns=TURNS, head=of_head / of_block))
    print(table(["schedule", "blocks of the stages", "closed form", "real"], rows))
    every = range(len(RUNS))
    pairs = [(i, j) for i in every for j in every if closed[i] > (1 + APART) * closed[j]]
    agree = sum(ratios[i] > ratios[j] for i, j in pairs)
    print(
        f"\nOf the {len(pairs)} pairs whose closed forms differ by {APART:.0%}, {agree} are in the same order in reality."
    )


if __name__ == "__main__":
    main()
