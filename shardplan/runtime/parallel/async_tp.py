"""Asynchronous tensor parallelism: inductor splits products and overlaps them with gathers and scatters."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardplan.torchlib.private import private

_GraphPass: Any = private("CustomGraphPass")


class Fused(_GraphPass):
    """Records which collectives of a compiled graph inductor fused; inductor calls it after fusing.

    Attributes:
        graphs: how many graphs were compiled.
        fused: operator of fused products and collectives -> how many.
        left: the collectives that were not fused.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.fused: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __call__(self, graph: Any) -> None:
        self.graphs += 1
        for node in graph.nodes:
            namespace, _, name = str(node.target).partition(".")
            if namespace == "symm_mem":
                self.fused[name.partition(".")[0]] += 1
            elif namespace == "_c10d_functional" and not name.startswith("wait_tensor"):
                self.left[name.partition(".")[0]] += 1

    def uuid(self) -> None:
        """None, so that no graph comes from a cache: each process compiles its graphs, and so records them."""


def inductor_options(fused: Fused) -> dict[str, Any]:
    """torch.compile's `options` that fuse products with gathers and scatters."""
    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": fused}


def enable_symmetric_memory(mesh: DeviceMesh) -> None:
    """Let the ranks of a one-dimensional mesh read each other's memory, as the fused operators do."""
    private("enable_symm_mem_for_group")(mesh.get_group().group_name)
