"""What it costs to look, before each forward, whether a model is still the one that was proven: `python -m benchmarks.watching`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardplan
from shardplan.runtime.apply import guards
from shardplan.runtime.apply.unchanged import unchanged

from .host import BATCH, SEQ, SIZE, TP
from .page import ratio_text, table
from .ways import fake_ranks, fresh, llama

DEPTH = 16
TEXT = """## Looking for what changed

`python -m benchmarks.watching`: CPU time of the host for a forward of a Llama of {depth} layers (hidden {hidden_size}, {seq} tokens) that looks whether the model is
still the one that was proven, over that of one that does not, in turns. tp {tp}, the group of processes is fake. Median of {repeats} pairs, and the
middle half of them; a quarter of the parameters is frozen.
"""


@contextmanager
def unwatched() -> Iterator[None]:
    """Plans are applied without the guard."""
    with patch.object(guards, "GUARDS", tuple(one for one in guards.GUARDS if one.looks is not unchanged)):
        yield


def forward_of(mesh: DeviceMesh, *, sp: bool, fsdp: bool) -> Callable[[], object]:
    model = fresh(llama(DEPTH, **SIZE))
    for layer in model.model.layers[: DEPTH // 4]:
        layer.requires_grad_(False)
    section = {"units": ["model.layers.*"]} if fsdp else False
    options = {"src_data_rank": None, "prove": False, "sequence_parallel": sp, "data_parallel": section}
    planned: nn.Module = shardplan.apply_plan(model, mesh, "llama", **options)
    ids, positions = torch.randint(0, 512, (BATCH, SEQ)), torch.arange(SEQ).unsqueeze(0)
    return partial(planned, input_ids=ids, position_ids=positions)


def times(mesh: DeviceMesh, repeats: int, **how: bool) -> tuple[list[float], list[float]]:
    """CPU seconds of forwards that look, and of those that do not."""
    looking = forward_of(mesh, **how)
    with unwatched():
        other = forward_of(mesh, **how)
    found: tuple[list[float], list[float]] = ([], [])
    for repeat in range(-5, repeats):
        for times, forward in zip(found, (looking, other), strict=True):
            start = time.process_time()
            forward()
            if repeat >= 0:
                times.append(time.process_time() - start)
    return found


def rows(repeats: int) -> Iterator[tuple[str, str, str]]:
    for name, sp, fsdp in (("TP", False, False), ("SP", True, False), ("TP under FSDP2", False, True)):
        with fake_ranks(TP, 2 if fsdp else 1) as mesh:
            yield name, "<= 1.02", ratio_text(*times(mesh, repeats, sp=sp, fsdp=fsdp))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(TEXT.format(depth=DEPTH, **SIZE, seq=SEQ, tp=TP, repeats=args.repeats))
    print(table(("forward", "goal", "times without looking"), rows(args.repeats)))


if __name__ == "__main__":
    main()
