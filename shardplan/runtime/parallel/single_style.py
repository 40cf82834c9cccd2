"""One of shardplan's styles without a plan, for torch's `parallelize_module`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from shardplan.compiler.bind import bind
from shardplan.compiler.lower.lowering import lower
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.language import parse_plan
from shardplan.model.build_tree import tree_of


class OwnStyle(ParallelStyle):
    """One of shardplan's styles on one module, for torch's own plans.

    Args:
        style: its name.
    """

    def __init__(self, style: str):
        super().__init__()
        self.style = style

    def __repr__(self) -> str:
        return f"OwnStyle({self.style!r})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        holder = nn.ModuleDict({"part": module})
        plan = parse_plan({"version": "1", "name": "part", "tensor_parallel": {"part": self.style}}).plan
        assert plan is not None, self.style
        resolved, findings = bind(plan, tree_of(holder), MeshSizes(tp=device_mesh.size()))
        if any(d.is_error for d in findings):
            raise PlanError(findings)
        own = lower(resolved).parallelize_plan["part"]
        own.src_data_rank = self.src_data_rank
        return own._apply(module, device_mesh)
