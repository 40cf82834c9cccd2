"""The Program: a plan compiled for one model and one size of the tp axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.core.plan import ResolvedPlan
from shardplan.core.program import ModuleProgram

from .describe import describe

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class Program:
    """What `compile_plan` returns.

    Args:
        resolved: the plan bound to the model.
        modules: what happens at each module, by name.
        tensor_parallel_modules: the same without sequence parallelism, where `modules` has it.
    """

    resolved: ResolvedPlan
    modules: Mapping[str, ModuleProgram]
    tensor_parallel_modules: Mapping[str, ModuleProgram] | None = None

    @property
    def sequence_parallel(self) -> bool:
        return self.resolved.sequence_parallel

    @property
    def variants(self) -> Mapping[bool, Mapping[str, ModuleProgram]]:
        """The modules of each way to run: with sequence parallelism (True), without it (False), or both."""
        variants = {self.sequence_parallel: self.modules}
        if self.tensor_parallel_modules is not None:
            variants[False] = self.tensor_parallel_modules
        return variants

    @property
    def sharded_logits(self) -> bool:
        """Whether the model hands on logits that are split over the vocabulary."""
        return any(module.logits is not None for module in self.modules.values())

    def describe(self) -> str:
        """The program as stable text, a line for each fact: ranks compare it, and a proof is known again by it."""
        return describe(self.resolved, self.variants)

    @property
    def parallelize_plan(self) -> dict[str, ParallelStyle]:
        """Fresh styles for torch's `parallelize_module`, by module name. Each may be applied once."""
        from .styles import make_styles  # they are torch's, which a program is described without

        return make_styles(self.resolved, self.variants)[0]
