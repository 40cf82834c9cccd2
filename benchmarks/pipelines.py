"""Played schedules against real ones: `python -m benchmarks.pipelines`."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardplan
from shardplan.core.schedules import SCHEDULES
from shardplan.cost.pipeline_time import StageTime, play
from shardplan.torchlib.schedule_actions import actions_of

from .page import table

RANKS, MICRO_BATCHES, SEQ, TURNS = 2, 4, 128, 9
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": SEQ,
}
SECTION = {"layers": "model.layers.*", "first": ["model.embed_tokens"], "last": ["model.norm", "lm_head"]}
# What runs: (schedule, how blocks are divided).
RUNS = [("gpipe", "layers"), ("1f1b", "layers"), *((name, "cost") for name in SCHEDULES)]
TEXT = """## Schedules of a pipeline

`python -m benchmarks.pipelines`: a step of a Llama of 12 blocks on {ranks} gloo processes, {micro} micro-batches of {seq} tokens, measured in turns, over that of
1F1B with blocks divided by cost; beside it the same from the table of actions, with what a block and the head take in these processes (forward, gradients
of the input, of the weights). {blocks}
"""


def measured(work: Callable[[], Any], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def costs(module: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], width: int) -> tuple[float, float, float]:
    """Seconds of a forward, of the gradients of its input and of those of its weights."""
    x = torch.randn(1, SEQ, width, requires_grad=True)

    def forward() -> Tensor:
        return module(x)

    def backward(wanted: list[Tensor]) -> None:
        out = forward()
        torch.autograd.grad(out, wanted, torch.ones_like(out))

    one = measured(forward)
    inputs = measured(lambda: backward([x])) - one
    return one, inputs, max(measured(lambda: backward([x, *parameters])) - one - inputs, 0.0)


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

    dist.barrier()
    of_block = costs(lambda x: block(x, position_embeddings=table_of), list(block.parameters()), config.hidden_size)
    of_head = costs(head, [*whole.lm_head.parameters()], config.hidden_size)
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, (of_block, of_head))
    of_block, of_head = (tuple(statistics.mean(one[part][i] for one in every) for i in range(3)) for part in range(2))
    pipelines, simulated = [], []
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
        sizes = pipeline.layout.cut.sizes
        stages = [
            StageTime(*(n * b + (h if i == len(sizes) - 1 else 0) for b, h in zip(of_block, of_head, strict=True)))
            for i, n in enumerate(sizes)
        ]
        simulated.append((play(actions_of(SCHEDULES[name], RANKS, MICRO_BATCHES), stages).seconds, sizes))
    batch = torch.randint(config.vocab_size, (MICRO_BATCHES, SEQ))
    real: list[list[float]] = [[] for _ in pipelines]
    for turn in range(TURNS + 1):
        for times, pipeline in zip(real, pipelines, strict=True):
            pipeline.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(input_ids=batch, labels=batch)
            dist.barrier()
            if turn:
                times.append(time.perf_counter() - start)
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
    share = sum(of_head) / sum(of_block)
    blocks = f"The head took {share:.1f} times what a block takes."
    print(TEXT.format(ranks=RANKS, micro=MICRO_BATCHES, seq=SEQ, blocks=blocks))
    print(table(["schedule", "blocks of the stages", "played", "real"], rows))
    played = [seconds for seconds, _ in simulated]
    print()
    for split in (False, True):
        group = [i for i, (name, _) in enumerate(RUNS) if split or not SCHEDULES[name].splits_backward]
        pairs = [(i, j) for i in group for j in group if played[i] > 1.02 * played[j]]
        agree = sum(ratios[i] > ratios[j] for i, j in pairs)
        what = "all schedules" if split else "schedules that compute each backward at once"
        print(
            f"Of the {len(pairs)} pairs of {what} whose played steps differ by 2 %, {agree} are in the same order in reality."
        )
    print(
        "torch computes the gradients of inputs and of weights in two passes over the graph, which small blocks on a CPU pay for; the "
        "played step has no such cost."
    )


if __name__ == "__main__":
    main()
