"""The estimated peak of a training step's memory against the allocator's own account of a real run.

    python -m benchmarks.memory [case ...]

Each case runs steps of a small model in processes (gloo on the CPU). The allocator reports every block that it gives and takes
back to torch's profiler; the peak of a step is the largest sum while it runs. The profiler sees the main thread alone: what a
thread of gloo gives back seems to stay. So pauses let gloo's threads end first, and a step begins with what Python
knows to be alive. The least over all steps but the first, and over all ranks, which hold equal shards, counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

import shardplan  # noqa: E402
from shardplan.core.estimates import Memory, OptimizerName  # noqa: E402
from shardplan.model import find_any  # noqa: E402
from shardplan.optimizers import Muon  # noqa: E402
from shardplan.runtime.parallel import collectives  # noqa: E402

from .page import table  # noqa: E402

_wait = collectives._wait
STEP = "a training step"
STEPS = 8
PAUSE = 0.01  # seconds
MEMORY = "[memory]"  # what the profiler calls an allocation
Step = Callable[[], None]
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Case:
    """One model on one mesh.

    Args:
        model, settings: as on the command line.
        mesh: axis -> size.
        options: arguments of `estimate` and `apply_plan` alike.
        optimizer: one of FORMS, or "muon".
    """

    model: str
    mesh: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 128
    micro_batch: int = 2
    optimizer: OptimizerName = "adamw-for-loop"  # torch's default on the CPU

    @property
    def ranks(self) -> int:
        return self.mesh["dp_shard"] * self.mesh["tp"]


LLAMA = {**SMALL, "vocab_size": 4000, "num_hidden_layers": 6}
MOE = {**SMALL, "vocab_size": 4000, "num_hidden_layers": 4, "num_local_experts": 4, "sliding_window": None}
GEMMA = {**SMALL, "vocab_size": 4000, "num_hidden_layers": 4, "head_dim": 32}
FINE_MOE = {
    **SMALL,
    "vocab_size": 4000,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
# The forms of torch's AdamW, as an estimate names them.
FORMS: dict[OptimizerName, dict[str, bool]] = {
    "adamw": {"foreach": True},
    "adamw-fused": {"fused": True},
    "adamw-for-loop": {"foreach": False},
}


def optimizer_of(name: OptimizerName, model: nn.Module) -> Optimizer:
    if name == "muon":
        return Muon(model, rest=partial(torch.optim.AdamW, foreach=True))
    return torch.optim.AdamW(model.parameters(), **FORMS[name])


UPDATED = {  # a few tokens: the most is there while the optimizer steps
    f"llama, TP, 8 tokens, {name}": Case("llama", {"dp_shard": 1, "tp": 4}, LLAMA, {"data_parallel": False}, 8, 1, name)
    for name in (*FORMS, "muon")
}
CASES = {
    **UPDATED,
    "llama, TP": Case("llama", {"dp_shard": 1, "tp": 2}, LLAMA, {"data_parallel": False}),
    "llama, SP": Case("llama", {"dp_shard": 1, "tp": 2}, LLAMA, {"data_parallel": False, "sequence_parallel": True}),
    "llama, SP and FSDP2": Case("llama", {"dp_shard": 2, "tp": 2}, LLAMA, {"sequence_parallel": True}),
    "llama, SP, FSDP2, activation checkpointing": Case(
        "llama",
        {"dp_shard": 2, "tp": 2},
        LLAMA,
        {"sequence_parallel": True, "activation_checkpointing": {"mode": "full"}},
    ),
    "llama, TP, FSDP2, split logits": Case("llama", {"dp_shard": 2, "tp": 2}, LLAMA, {"logits": "sharded"}),
    "llama, TP, FSDP2, fused logits": Case("llama", {"dp_shard": 2, "tp": 2}, LLAMA, {"logits": "fused"}),
    "llama, TP, fused logits, activation checkpointing": Case(
        "llama",
        {"dp_shard": 1, "tp": 2},
        LLAMA,
        {"data_parallel": False, "logits": "fused", "activation_checkpointing": {"mode": "full"}},
    ),
    "gemma2, TP": Case("gemma2", {"dp_shard": 1, "tp": 2}, GEMMA, {"data_parallel": False}),
    "mixtral, SP and FSDP2": Case("mixtral", {"dp_shard": 2, "tp": 2}, MOE, {"sequence_parallel": True}),
    "qwen3_moe, TP and FSDP2": Case("qwen3_moe", {"dp_shard": 2, "tp": 2}, FINE_MOE),
}


def measured_peak(case: Case) -> int:
    """On each rank of a process group: the most bytes of a step that is not the first, by the allocator's account."""
    mesh = shardplan.build_mesh(**case.mesh)
    found = find_any(case.model, settings=case.settings, trust_remote_code=False, inputs=None)

    def made() -> tuple[list[nn.Module], Step]:
        torch.manual_seed(0)  # ranks that store the same weights have the same ones
        model = found.build("cpu").train()
        model = shardplan.apply_plan(model, mesh, "auto", src_data_rank=None, prove=False, **case.options)
        optimizer = optimizer_of(case.optimizer, model)

        def step() -> None:
            given = torch.Generator().manual_seed(0)  # tp ranks have one batch
            ids = torch.randint(case.settings["vocab_size"], (case.micro_batch, case.seq_len), generator=given)
            with record_function(STEP):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()

        return [model], step

    return min(peaks_of_steps(made)[1:])


def peaks_of_steps(made: Callable[[], tuple[Iterable[nn.Module], Step]], steps: int = STEPS) -> list[int]:
    """The most bytes of each step of what is made, the model with it.

    Args:
        made: () -> the modules whose forwards are followed by a pause, and a step, whose measured part has the name STEP.
    """
    collectives._wait = _wait_late
    gc.collect()  # what another case left is not given back while this one runs
    others = _tensors()  # held, so that their addresses stay theirs
    before = _storages(others)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        pausing: set[nn.Module] = set()
        # Of all modules, and before the plan: a planned model refuses later hooks where a rank has a share of the values.
        nn.modules.module.register_module_forward_hook(
            lambda module, *_: time.sleep(PAUSE) if module in pausing else None
        )
        models, step = made()
        pausing.update(module for model in models for module in model.modules())
        alive = []
        for _ in range(steps):
            gc.collect()  # nor what building left in circles
            alive.append(_alive(before))
            step()
    return _peaks(profiled.profiler.kineto_results.events(), alive)


def _wait_late(result: torch.Tensor) -> torch.Tensor:
    """While this thread still holds a collective, gloo's ends it: so what it needed is given back here."""
    time.sleep(PAUSE)
    return _wait(result)


def _tensors() -> list[torch.Tensor]:
    """All of this process; those without memory of their own are of other types."""
    return [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter, DTensor)]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Their storages: address -> bytes."""
    locals_ = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in locals_ if tensor.device.type != "meta")
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _alive(before: Mapping[int, int]) -> int:
    """The bytes of all tensors that Python knows: between two steps there are no others.

    Args:
        before: the storages that are not of the model.
    """
    return sum(size for address, size in _storages(_tensors()).items() if address not in before)


def _peaks(events: Any, alive: Sequence[int]) -> list[int]:
    """The most bytes of each step, where so many were alive before it."""
    steps = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == STEP)
    most, before, now = [0] * len(steps), [0] * len(steps), 0
    for event in sorted((e for e in events if e.name() == MEMORY), key=lambda e: e.start_ns()):
        now += event.nbytes()
        for i, (begin, end) in enumerate(steps):
            if event.start_ns() < begin:
                before[i] = now
            elif event.start_ns() <= end:
                most[i] = max(most[i], now)
    return [known + most_ - seen for known, most_, seen in zip(alive, most, before, strict=True)]


def estimated_peak(case: Case) -> int:
    return estimated(case).total


def estimated(case: Case) -> Memory:
    return shardplan.estimate(
        shardplan.Model(case.model, settings=case.settings),
        "auto",
        case.mesh,
        shardplan.TrainingStep(case.seq_len, micro_batch=case.micro_batch, precision="fp32", optimizer=case.optimizer),
        **case.options,
    ).memory


def measured(names: Sequence[str], ranks: int) -> dict[str, int]:
    """The peaks of cases for one number of ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "benchmarks.memory"]
    ran = subprocess.run([sys.executable, *start, "--here", *names], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))


def on_this_rank(names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    peaks = torch.tensor([measured_peak(CASES[name]) for name in names])
    dist.all_reduce(peaks, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(json.dumps(dict(zip(names, peaks.tolist(), strict=True))), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="cases; without one all")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    names = args.names or list(CASES)
    if args.here:
        return on_this_rank(names)
    real: dict[str, int] = {}
    for ranks in sorted({CASES[name].ranks for name in names}):
        real |= measured([name for name in names if CASES[name].ranks == ranks], ranks)
    print("## The estimated peak of memory\n")
    print(
        "`python -m benchmarks.memory`: bytes of a rank at the peak of a training step with AdamW, float32, as the CPU's\n"
        "allocator accounts for a real run in gloo processes, and as `shardplan estimate` says without one.\n"
    )
    guesses = {name: estimated(CASES[name]) for name in names}
    rows = [
        (name, guess.phase, f"{real[name]:,}", f"{guess.total:,}", "0.99 to 1.01", f"{guess.total / real[name]:.4f}")
        for name, guess in guesses.items()
    ]
    print(table(("case", "its peak is in", "allocator", "estimate", "goal", "estimate / allocator"), rows))


if __name__ == "__main__":
    main()
