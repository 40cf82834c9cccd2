"""The inputs of a planned model's guards, and the type of a guard (`guards.GUARDS`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardplan.compiler.lower.program import Program
from shardplan.runtime.parallel.regime import Regime

from .plan_mesh import PlanMesh

# Called before a module's forward, with its arguments. It raises where something is wrong, and returns True if it need not be
# called again. One that is a hook of its own (`Guard.alone`) returns what torch's hooks return, the arguments.
Look = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Looks = Mapping[nn.Module, Look]  # module -> what is called before its forward


@dataclass(frozen=True)
class Watched:
    """A model that a plan was applied to.

    Args:
        outer: what its caller calls, with the wrappers of a data-parallel backend and of peft.
        inner: the model that the program is for.
        mesh: all ranks that run the model.
        parts: the hooks of modules that may be called directly.
        program: the applied program.
        regime: the switches of the tensor-parallel styles; None where there are none.
        split: whether it runs on several tp ranks, or in a data-parallel backend.
        drawn_apart: for each parameter, whether ranks had different values before they were split; () where that is not known.
    """

    outer: nn.Module
    inner: nn.Module
    mesh: PlanMesh
    split: bool
    parts: Looks
    program: Program
    regime: Regime | None
    drawn_apart: tuple[bool, ...] = ()
