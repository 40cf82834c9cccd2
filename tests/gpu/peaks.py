"""The CUDA allocator's peak of a training step against `estimate`, with each form of AdamW: `python -m tests.gpu.peaks cuda`.

The cases of benchmarks/memory.py at the sizes of real layers, on one rank whose process group sends nothing. A CPU has no such
allocator: there the steps run, and small ones.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardplan
from benchmarks.memory import CASES, FORMS, UPDATED, Case
from benchmarks.ways import FakeStore
from shardplan.model import find_any

from .rows import attempt

# Of Llama-3.1-8B and Mixtral-8x7B, with fewer layers and experts.
REAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LARGE: dict[str, dict[str, Any]] = {
    "llama": {**REAL, "vocab_size": 128256, "num_hidden_layers": 4},
    "mixtral": {**REAL, "vocab_size": 32000, "num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": None},
}


def cases(device: str) -> Iterator[tuple[str, Case]]:
    """With each form of AdamW: those of a few tokens have theirs."""
    for name, case in CASES.items():
        length = {} if name in UPDATED else {"seq_len": 4096, "micro_batch": 1}
        if device == "cuda":
            case = replace(case, settings=LARGE[case.model], **length)
        for form in [case.optimizer] if name in UPDATED else FORMS:
            yield f"{name.removesuffix(f', {form}')}, {form}", replace(case, optimizer=form)


def estimated(case: Case) -> int:
    """Bytes."""
    step = shardplan.TrainingStep(
        case.seq_len, micro_batch=case.micro_batch, precision="bf16", optimizer=case.optimizer
    )
    model = shardplan.Model(case.model, settings=case.settings)
    return shardplan.estimate(model, "auto", case.mesh, step, **case.options).memory.total


def peak_of(case: Case, device: str) -> int:
    """Bytes at the peak of the third step; 0 on a CPU."""
    found = find_any(case.model, settings=case.settings, trust_remote_code=False, inputs=None)
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    try:
        mesh = init_device_mesh(device, tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
        model = found.build("meta", torch.bfloat16).train()
        model = shardplan.apply_plan(model, mesh, "auto", src_data_rank=None, prove=False, **case.options)
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        model.to_empty(device=device)
        with torch.no_grad():  # experts are to have about as many tokens each, as `estimate` says
            for tensor in _local_tensors(model):
                tensor.normal_(std=0.02) if tensor.ndim > 1 else tensor.fill_(1)
        optimizer = torch.optim.AdamW(model.parameters(), **FORMS[case.optimizer])
        ids = torch.randint(case.settings["vocab_size"], (case.micro_batch, case.seq_len), device=device)
        for _ in range(3):
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    finally:
        dist.destroy_process_group()


def _local_tensors(model: nn.Module) -> Iterator[Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measured(case: Case, device: str) -> dict[str, Any]:
    guess, peak = estimated(case), peak_of(case, device)
    row: dict[str, Any] = {"estimate": guess}
    if peak:
        row |= {"allocator": peak, "estimate / allocator": guess / peak, "ok": 0.99 <= guess / peak <= 1.01}
    return row


def main() -> None:
    device = sys.argv[1]
    one = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    one @ one  # cuBLAS keeps a workspace from its first call on, in every process: 64 MiB on an H100
    for name, case in cases(device):
        attempt(name, partial(measured, case, device))


if __name__ == "__main__":
    main()
