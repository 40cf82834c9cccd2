"""Counting the collectives that really run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardplan.torchlib.operators import collective_of
from shardplan.torchlib.private import private

_DispatchMode: Any = private("TorchDispatchMode")
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


class CollectiveCounter(_DispatchMode):
    """While the context lasts, notes every collective that this process starts, on whatever group, in calls and in
    their backward: torch's functional collectives and those of `torch.distributed`.

    Inside a compiled graph nothing is seen. Under torch's LocalTensorMode collectives are carried
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
        if (name := collective_of(func.name())) is not None:
            tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.calls.append(Collective(name, max((x.numel() for x in tensors), default=0)))
        return func(*args, **(kwargs or {}))
