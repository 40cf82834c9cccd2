"""Played schedules against real ones: `python -m benchmarks.pipelines`."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from transformers import LlamaConfig, LlamaForCausalLM

import shardplan
from shardplan.core.schedules import SCHEDULES
from shardplan.cost.pipeline_time import StageTime, play
from shardplan.torchlib.schedule_actions import actions_of

from .page import table

RANKS, MICRO_BATCHES, SEQ, TURNS = 2, 4, 256, 5
APART = 0.05  # played steps that differ by less are no order that a measurement could confirm
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
# What runs: (schedule, how blocks are divided).
RUNS = [("gpipe", "layers"), ("1f1b", "layers"), *((name, "cost") for name in SCHEDULES)]
TEXT = """## Schedules of a pipeline

`python -m benchmarks.pipelines`: a step of a Llama of 8 blocks on {ranks} gloo processes, {micro} micro-batches of {seq} tokens, the median of {turns} turns, over that of
1F1B with blocks divided by cost in the same turn; beside it the same from the table of actions, with what a block, the head and a hand-over take in these processes. A backward at once
and one in two halves (torch's `stage_backward_input` and `stage_backward_weight`, which go over the graph twice) are measured by themselves: {split}. {blocks}
"""
Costs = tuple[float, float, float, float]  # seconds of a forward, of a backward at once, and of its two halves


def measured(work: Callable[[], Any], repeats: int = 9) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def costs(module: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], width: int) -> Costs:
    """As torch's stages compute them."""

    def forward() -> tuple[Tensor, Tensor]:
        x = torch.randn(1, SEQ, width, requires_grad=True)
        return x, module(x)

    def at_once() -> None:
        x, out = forward()
        stage_backward(out, torch.ones_like(out), [x])
        clear()

    def first_half() -> list[dict[str, Any]]:
        x, out = forward()
        return stage_backward_input([out], [torch.ones_like(out)], [x], iter(parameters))[1]

    def both() -> None:
        stage_backward_weight(iter(parameters), first_half())
        clear()

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    one, half = measured(forward), measured(first_half)
    return one, measured(at_once) - one, half - one, measured(both) - half


def hand_over(index: int, width: int) -> float:
    """Seconds of sending what a stage sends."""
    x = torch.zeros(1, SEQ, width)

    def there_and_back() -> None:
        for source in range(RANKS):
            dist.send(x, 1 - source) if index == source else dist.recv(x, source)

    return measured(there_and_back, 21) / RANKS


def stage_times(sizes: Sequence[int], block: Costs, head: Costs, *, splits: bool) -> list[StageTime]:
    """What each stage costs. The first one has no input that needs a gradient: torch computes all of its backward in the second half."""
    times = []
    for stage, blocks in enumerate(sizes):
        more = stage == len(sizes) - 1
        forward, whole, inputs, weights = (blocks * b + (h if more else 0.0) for b, h in zip(block, head, strict=True))
        halves = (inputs, weights) if splits and stage else (0.0, whole) if splits else (whole, 0.0)
        times.append(StageTime(forward, *halves))
    return times


def together(one: Costs) -> Costs:
    """The mean over the ranks."""
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, one)
    return tuple(map(statistics.mean, zip(*every, strict=True)))  # type: ignore[return-value]


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

    def look() -> tuple[Costs, Costs]:
        dist.barrier()
        of_block = costs(lambda x: block(x, position_embeddings=table_of), weights[0], config.hidden_size)
        dist.barrier()
        return together(of_block), together(costs(head, weights[1], config.hidden_size))

    before, sent = look(), hand_over(index, config.hidden_size)
    pipelines = []
    for name, balance in RUNS:
        pipeline = shardplan.apply_pipeline(
            LlamaForCausalLM(config),
            mesh,
            "llama",
            schedule=name,
            micro_batches=MICRO_BATCHES,
            seq_len=SEQ,
            prove=False,
            check_inputs=False,
            pipeline_parallel=SECTION | {"balance": balance},
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
    of_block, of_head = (tuple(map(statistics.mean, zip(*one, strict=True))) for one in zip(before, after, strict=True))
    simulated = []
    for (name, _), pipeline in zip(RUNS, pipelines, strict=True):
        record, sizes = SCHEDULES[name], pipeline.layout.cut.sizes
        stages = stage_times(sizes, of_block, of_head, splits=record.splits_backward)  # type: ignore[arg-type]
        simulated.append((play(actions_of(record, RANKS, MICRO_BATCHES), stages, sent).seconds, sizes))
    if index == 0:
        Path(folder, "made").write_text(repr((of_block, of_head, simulated, real)), "utf-8")
    dist.destroy_process_group()


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder,), nprocs=RANKS)
        of_block, of_head, simulated, real = eval(Path(folder, "made").read_text("utf-8"))
    base = RUNS.index(("1f1b", "cost"))
    ratios = [statistics.median(a / b for a, b in zip(one, real[base], strict=True)) for one in real]
    rows = [
        [name, ", ".join(map(str, sizes)), f"{seconds / simulated[base][0]:.2f}", f"{ratio:.2f}"]
        for (name, _), (seconds, sizes), ratio in zip(RUNS, simulated, ratios, strict=True)
    ]
    blocks = f"The head took {sum(of_head[:2]) / sum(of_block[:2]):.1f} times what a block takes."
    split = f"the halves of a block took {sum(of_block[2:]) / of_block[1]:.2f} times what its backward takes at once"
    print(TEXT.format(ranks=RANKS, micro=MICRO_BATCHES, seq=SEQ, turns=TURNS, split=split, blocks=blocks))
    print(table(["schedule", "blocks of the stages", "played", "real"], rows))
    played = [seconds for seconds, _ in simulated]
    print()
    for split in (False, True):
        group = [i for i, (name, _) in enumerate(RUNS) if split or not SCHEDULES[name].splits_backward]
        pairs = [(i, j) for i in group for j in group if played[i] > (1 + APART) * played[j]]
        agree = sum(ratios[i] > ratios[j] for i, j in pairs)
        what = "all schedules" if split else "schedules that compute each backward at once"
        print(
            f"Of the {len(pairs)} pairs of {what} whose played steps differ by {APART:.0%}, {agree} are in the same order in reality."
        )


if __name__ == "__main__":
    main()
