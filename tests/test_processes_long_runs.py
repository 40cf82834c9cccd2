"""What a long run keeps: after the first steps, or checks, memory, tensors, descriptors, threads and hooks stay as many as they are."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from processes import on_ranks
from small_models import batch, small_model
from torch import nn

import shardplan
from tests.test_threads import TYPES, validated

EARLY = 20  # steps, or checks, after which nothing may be made that stays
GROWTH = 16  # MiB that an allocator may keep beyond that, whatever the number of steps


@dataclass(frozen=True)
class Kept:
    """What a process has."""

    tensors: int
    descriptors: int
    threads: int
    hooks: int
    memory: int  # MiB

    @classmethod
    def now(cls, model: nn.Module | None = None) -> Kept:
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return cls(
            sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            sum(map(_hooks, model.modules())) if model is not None else 0,
            pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        )


def _hooks(module: nn.Module) -> int:
    of_module = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    of_tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    own = sum(len(getattr(module, name)) for name in of_module)
    parameters = module.parameters(recurse=False)
    return own + sum(len(getattr(one, name, None) or ()) for one in parameters for name in of_tensors)


def stayed(run: Callable[[], object], times: int, model: nn.Module | None = None) -> None:
    for _ in range(EARLY):
        run()
    early = Kept.now(model)
    assert early.hooks or model is None
    for _ in range(times - EARLY):
        run()
    late = Kept.now(model)
    assert late.memory <= early.memory + GROWTH, (early, late)
    assert (late.tensors, late.descriptors, late.threads, late.hooks) == (
        early.tensors,
        early.descriptors,
        early.threads,
        early.hooks,
    ), (early, late)


def train(steps: int) -> None:
    mesh = shardplan.build_mesh(dp_shard=2, tp=2)
    model = shardplan.apply_plan(small_model("llama"), mesh, "auto", sequence_parallel=True, prove=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        ids = batch(mesh["dp_shard"].get_local_rank(), count % 7)
        for one, scale in shardplan.micro_batches(model, [{"input_ids": ids, "labels": ids}] * 2):
            (model(**one, use_cache=False).loss * scale).backward()
        shardplan.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    stayed(step, steps, model)


@pytest.mark.parametrize(
    "steps", [pytest.param(60, marks=pytest.mark.slow), pytest.param(1001, marks=pytest.mark.exhaustive)]
)
def test_a_long_training_keeps_nothing(steps: int) -> None:
    """The inputs of forward 2,000 are compared, so step 1,000 has tensors that its next forward lets go."""
    on_ranks(4, train, steps, seconds=3600.0)


def check(checks: int, threads: int) -> None:
    """Validate so often, in turn for each model type."""
    with ThreadPoolExecutor(threads) as pool:

        def all_types() -> None:
            list(pool.map(validated, TYPES))

        stayed(all_types, checks)
    assert threading.active_count() < threads + 8


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.exhaustive
def test_two_hundred_checks_keep_nothing(threads: int) -> None:
    on_ranks(1, check, 50, threads, seconds=3600.0)
