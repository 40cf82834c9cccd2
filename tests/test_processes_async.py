"""Asynchronous tensor parallelism, on the CPU: inductor's fusion is its own, the fused operators are torch's references."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from processes import on_ranks
from small_models import batch, small_model, whole
from torch.distributed.device_mesh import init_device_mesh

import shardplan
from shardplan.proof.compare import TOLERANCE, relative_error
from shardplan.runtime.apply import compilation

ASYNC = {"modules": ["model.layers.*"], "async_tensor_parallel": True}


def on_cpu(sections: dict[str, Any]) -> dict[str, Any]:
    """One step against the unsharded model's; what was fused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    with pytest.raises(RuntimeError, match="needs a mesh of CUDA devices"):
        shardplan.apply_plan(small_model("llama"), mesh, "auto", sequence_parallel=True, compile=ASYNC, prove=False)
    with pytest.raises(shardplan.PlanError, match="SP383"):
        shardplan.apply_plan(small_model("llama"), mesh, "auto", sequence_parallel=False, compile=ASYNC, prove=False)
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback)
    before, compilation.ASYNC_DEVICES = compilation.ASYNC_DEVICES, ("cpu",)
    nccl, torch.distributed.is_nccl_available = torch.distributed.is_nccl_available, lambda: True  # inductor asks
    model = small_model("llama")
    try:
        shardplan.apply_plan(model, mesh, "auto", sequence_parallel=True, compile=ASYNC, **sections, prove=False)
        with pytest.raises(ValueError, match="run a step first"):
            _ = shardplan.applied(model).async_collectives
        ids = batch(mesh.get_local_rank("dp_shard"))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    finally:
        compilation.ASYNC_DEVICES, torch.distributed.is_nccl_available = before, nccl
        library._destroy()
        torch._dynamo.reset()
    reference = small_model("llama")
    (sum(reference(input_ids=batch(i), labels=batch(i), use_cache=False).loss for i in range(2)) / 2).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(whole(p.grad), q.grad) <= TOLERANCE[torch.float32], name
    return {way: dict(counts) for way, counts in shardplan.applied(model).async_collectives.items()}


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_products_are_fused_with_gathers_and_scatters():
    for seen in on_ranks(4, on_cpu, {}, seconds=500):
        assert seen["fused"]["fused_all_gather_matmul"] >= 2, (
            "attention's and the MLP's inputs are gathered in one graph"
        )
        assert seen["fused"]["fused_matmul_reduce_scatter"] >= 2, "and their results scattered"
