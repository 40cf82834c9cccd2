"""What collectives of a layer allocate: `python -m benchmarks.copies`.

The allocator reports every block that it gives to torch's profiler. Counted are those of the moves of values in a process group that torch
calls "fake", without the products that run during a reduction. One layer is the difference of two depths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from .collectives import DEPTHS
from .host import SIZE
from .memory import MEMORY
from .page import table
from .ways import Way, fake_ranks, llama, planned

TP, TOKENS = 4, 32
SHAPE = SIZE | {"num_key_value_heads": TP}
BATCHES = (1, 2)
MOVES = ("_Move", "_MoveBackward", "_MoveOver", "_MoveOverBackward")  # as the profiler names them
PRODUCT = "aten::mm"
WAYS: dict[str, tuple[Way, float]] = {  # with the least, in units of an activation
    "TP": (partial(planned, sp=False), 0.0),
    "TP, activation checkpointing": (partial(planned, sp=False, checkpointed=True), 0.0),
    "SP": (partial(planned, sp=True), 4 + 4 / TP),
}
TEXT = """## What collectives of a layer allocate

`python -m benchmarks.copies`: bytes that the allocator gives while values move between ranks in a Llama layer, forward and backward, eager, tp {tp}; in
units of an activation, A = batch x tokens x hidden x 4 bytes. The least: nothing for an all-reduce, A for an all-gather, A / tp for a
reduce-scatter. What several sequences take more are copies: a gathered batch has its tokens in the order of ranks, and a reduce-scatter
reads them in that order, A each.
"""


def allocated(model: nn.Module, batch: int) -> int:
    """The bytes that moves of values allocate in a step."""
    ids = torch.randint(0, 512, (batch, TOKENS))
    model(input_ids=ids).logits.sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model(input_ids=ids).logits.sum().backward()
    events = profiled.profiler.kineto_results.events()
    moves, products = (
        [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in names]
        for names in (MOVES, (PRODUCT,))
    )

    def during(spans: list[tuple[int, int]], time: int) -> bool:
        return any(begin <= time <= end for begin, end in spans)

    given = [(e.start_ns(), e.nbytes()) for e in events if e.name() == MEMORY and e.nbytes() > 0]
    return sum(size for time, size in given if during(moves, time) and not during(products, time))


def rows() -> Iterator[tuple[str, str, str]]:
    for name, (way, least) in WAYS.items():
        for batch in BATCHES:
            with fake_ranks(TP) as mesh:
                few, many = (allocated(way(llama(depth, **SHAPE), mesh), batch) for depth in DEPTHS)
            unit = batch * TOKENS * SHAPE["hidden_size"] * 4
            yield f"{name}, batch {batch}", f"{(many - few) / unit:.2f} A", f"{least:.2f} A"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(TEXT.format(tp=TP))
    print(table(("plan", "allocated", "least"), rows()))


if __name__ == "__main__":
    main()
