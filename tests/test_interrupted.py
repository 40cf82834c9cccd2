"""Ctrl-C at drawn lines of apply_plan: the model is untouched, or unusable with words."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import small_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardplan
from shardplan.api import apply
from shardplan.runtime.apply import phases

ROOT = str(Path(shardplan.__file__).parent)
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 20))]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dist.destroy_process_group()


class Interrupt:
    """Counts the lines of the package that run, and is Ctrl-C at one of them."""

    def __init__(self, line: int = 0):
        self.line, self.count = line, 0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                raise KeyboardInterrupt
        return self.trace

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **options: Any) -> Any:
            sys.settrace(self.trace)
            try:
                return function(*args, **options)
            finally:
                sys.settrace(None)

        return traced


def applied(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    options = {"sequence_parallel": True, "activation_checkpointing": {"mode": "full"}}
    shardplan.apply_plan(model, mesh, "auto", prove=False, **options)


def state(model: torch.nn.Module) -> Any:
    hooks = {
        name: (len(one._forward_hooks), len(one._forward_pre_hooks), {*one.__dict__})
        for name, one in model.named_modules()
    }
    return {name: id(one) for name, one in model.named_parameters()}, hooks


def outcome(model: torch.nn.Module, before: Any) -> str:
    if state(model) == before:
        return "untouched"
    with pytest.raises(
        RuntimeError, match=r"this model is unusable: applying a plan failed in the step '.*'; build it again"
    ):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="build it again|unusable|half-way"):
        shardplan.applied(model)
    return "unusable"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_an_interrupted_model_is_untouched_or_unusable(seed: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    """Where parameters change, which is the last of what `apply_plan` does, every line is as likely."""
    whole, run = small_model("phi3"), phases.apply_program
    applied(copy.deepcopy(whole), mesh)  # what is found once for each class is found
    count = Interrupt()
    monkeypatch.setattr(phases, "apply_program", count.within(run))
    applied(copy.deepcopy(whole), mesh)
    found = set()
    for line in random.Random(seed).sample(range(1, count.count + 1), 8):
        model = copy.deepcopy(whole)
        before = state(model)
        monkeypatch.setattr(phases, "apply_program", Interrupt(line).within(run))
        with pytest.raises(KeyboardInterrupt):
            applied(model, mesh)
        found.add(outcome(model, before))
    assert "unusable" in found


def test_before_the_phases_it_is_untouched(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    whole, decide = small_model("phi3"), apply.decide
    count = Interrupt()
    monkeypatch.setattr(apply, "decide", count.within(decide))
    applied(copy.deepcopy(whole), mesh)
    for line in random.Random(0).sample(range(1, count.count + 1), 2):
        model = copy.deepcopy(whole)
        before = state(model)
        monkeypatch.setattr(apply, "decide", Interrupt(line).within(decide))
        with pytest.raises(KeyboardInterrupt):
            applied(model, mesh)
        assert outcome(model, before) == "untouched"
