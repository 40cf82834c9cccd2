"""Operators of torch without a public name, and which operators are collectives."""

from __future__ import annotations

import torch

ADD_ = torch.ops.aten.add_.Tensor
DETACH = torch.ops.aten.detach.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default
DEVICE = torch.ops.prim.device.default  # a tensor's device
FUNCTIONAL = torch.ops._c10d_functional

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")
NO_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
# An operator's name without its namespace -> the collective. Any other is counted under its own name.
COLLECTIVES: dict[str, str] = {
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
}


def collective_of(operator: str) -> str | None:
    """The collective of an operator ("c10d::allreduce_"): "all_reduce", "all_gather", "reduce_scatter", "broadcast",
    ...; None for other operators."""
    namespace, _, name = operator.partition("::")
    name = name.partition(".")[0]
    if namespace not in NAMESPACES or name in NO_COLLECTIVES:
        return None
    return COLLECTIVES.get(name, name)
