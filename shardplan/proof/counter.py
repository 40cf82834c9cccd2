"""Counting the collectives that really run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardplan.torchlib.private import private

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")
NO_COLLECTIVES = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
# An operator's name without its namespace -> the collective. What is not here is counted under its own name.
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
    "broadcast_": "broadcast",
    "scatter_": "scatter",
}

_leaves = private("tree_leaves")


@dataclass(frozen=True, slots=True)
class Collective:
    """One call.

    Args:
        name: "all_reduce", "all_gather", "reduce_scatter", "broadcast", ...
        elements: of the tensor that this rank puts in (the largest, if there are several).
    """

    name: str
    elements: int


class CollectiveCounter(private("TorchDispatchMode")):
    """While the context lasts, notes every collective that this process starts, on whatever group, in calls and in
    their backward: torch's functional collectives and those of `torch.distributed`.

    Inside a compiled graph nothing is seen. In the simulation of all ranks (`simulated_mesh`) collectives are carried
    out by something else; count with one rank of a group, which may be the fake one.

    Attributes:
        calls: in the order in which they were started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    @property
    def counts(self) -> Counter[str]:
        """How many collectives of each name."""
        return Counter(call.name for call in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor carries it out, and what that takes comes here again
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if namespace in NAMESPACES and name not in NO_COLLECTIVES:
            tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.calls.append(Collective(COLLECTIVES.get(name, name), max((x.numel() for x in tensors), default=0)))
        return func(*args, **(kwargs or {}))
