"""The pattern that inductor fuses for asynchronous tensor parallelism is in the graphs of a compiled block.

torch's own matchers and pass run on these graphs (`torch/_inductor/fx_passes/micro_pipeline_tp.py`), in one process with a fake group.
`test_processes_async.py` runs the fused operators.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import fx
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import micro_pipeline_tp
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import view_to_reshape

import shardplan
from benchmarks.ways import fake_ranks, fresh, llama

BACKEND = "keeps_graphs"
GATHERS = {
    "fused_all_gather_matmul": 2
}  # the inputs of attention and of the MLP; in backward the gradients of their results
SCATTERS = {"fused_matmul_reduce_scatter": 2}  # the results of both


def graphs_of_a_block(monkeypatch: pytest.MonkeyPatch, batch: int) -> list[fx.GraphModule]:
    """Those of its forward and of its backward, as inductor gets them."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(copy.deepcopy(graph))
        return make_boxed_func(graph.forward)

    def partition(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:  # as inductor does
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, **options)

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        decompositions = select_decomp_table()
        compiler = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=decompositions
        )
        return compiler(graph, inputs)

    monkeypatch.setitem(registry._BACKENDS, BACKEND, None)
    monkeypatch.setitem(registry._COMPILER_FNS, BACKEND, backend)
    compile_section = {"modules": ["model.layers.*"], "backend": BACKEND}
    config = llama(1, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    torch._dynamo.reset()
    try:
        with fake_ranks(2) as mesh:
            model = shardplan.apply_plan(
                fresh(config),
                mesh,
                "llama",
                sequence_parallel=True,
                data_parallel=False,
                compile=compile_section,
                src_data_rank=None,
                prove=False,
            )
            model(input_ids=torch.randint(99, (batch, 8))).logits.sum().backward()
    finally:
        torch._dynamo.reset()
    return graphs


def operators(graph: fx.GraphModule, namespace: str) -> Counter[str]:
    parts = (str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function")
    return Counter(name[1] for name in parts if name[0] == namespace and name[1] != "wait_tensor")


@pytest.mark.parametrize("batch", [1, 2])
def test_torch_finds_and_fuses_its_pattern(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """The fused product of a scatter takes one product alone. The gradient of an input is the sum of several, so backward's scatters stay.
    With a batch of 1 there are two views between a gather and its products, and torch looks through one: gathers stay."""
    monkeypatch.setattr(symmetric, "is_symm_mem_enabled_for_group", lambda name: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    forward, backward = graphs_of_a_block(monkeypatch, batch)
    gathers = GATHERS if batch > 1 else {}
    stay = {} if batch > 1 else {"all_gather_into_tensor": 2}
    for graph, fused, left in (
        (forward, gathers | SCATTERS, stay),
        (backward, gathers, {"reduce_scatter_tensor": 2} | stay),
    ):
        assert operators(graph, "_c10d_functional") == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert len(micro_pipeline_tp.find_all_gather_patterns(graph.graph)) == 2
        assert len(micro_pipeline_tp.find_reduce_scatter_patterns(graph.graph)) == 2
        view_to_reshape(graph)  # as inductor does before
        micro_pipeline_tp.micro_pipeline_tp_pass(graph.graph)
        assert operators(graph, "symm_mem") == fused
        assert operators(graph, "_c10d_functional") == left
