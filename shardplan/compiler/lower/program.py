"""The Program: a plan compiled for one model and one size of the tp axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardplan.core.layout import Layout
from shardplan.core.module_program import ModuleProgram
from shardplan.core.plan import Overlays, ResolvedPlan, variant_name
from shardplan.core.tree import full_name

from .describe import describe

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class Program:
    """What `compile_plan` returns.

    Args:
        resolved: the plan bound to the model.
        variants: the program of each module, by name, for each way to run: with the overlays of `resolved`, and without sequence parallelism.
    """

    resolved: ResolvedPlan
    variants: Mapping[Overlays, Mapping[str, ModuleProgram]]

    @property
    def sequence_parallel(self) -> bool:
        return self.resolved.sequence_parallel

    @property
    def by_name(self) -> Mapping[str, Mapping[str, ModuleProgram]]:
        """The variants by `variant_name`, the running model's name for them."""
        return {variant_name(overlays): modules for overlays, modules in self.variants.items()}

    @property
    def modules(self) -> Mapping[str, ModuleProgram]:
        """The program of each module with the overlays of `resolved`."""
        return self.variants[self.resolved.overlays]

    @cached_property
    def unreadable(self) -> tuple[str, ...]:
        """The parameters that the variant without sequence parallelism cannot read as they are stored."""
        own = self._stored(self.modules)
        return tuple(
            name
            for modules in self.variants.values()
            for name, stored in self._stored(modules).items()
            if stored != own.get(name, stored)
        )

    @staticmethod
    def _stored(modules: Mapping[str, ModuleProgram]) -> Mapping[str, tuple[Layout, tuple[int, ...]]]:
        return {
            full_name(name, p.name): (p.stored, p.parts if p.dim is not None else ())
            for name, module in modules.items()
            for p in module.parameters
        }

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """The modules with parameters that are stored over the ep axis."""
        return tuple(name for name, module in self.modules.items() if module.over_ep)

    @property
    def exchanges_heads(self) -> bool:
        """Whether modules get all tokens and a share of the heads, over cp."""
        return any(module.on_cp is not None and module.on_cp.hollow is not None for module in self.modules.values())

    @property
    def sharded_logits(self) -> bool:
        """Whether the model returns logits that are split over the vocabulary."""
        return any(module.logits is not None and not module.later for module in self.modules.values())

    @property
    def fused_heads(self) -> tuple[str, ...]:
        """The modules whose logits the loss computes, also on one rank of the tp axis."""
        return tuple(name for name, module in self.modules.items() if module.later)

    def describe(self) -> str:
        """The program as stable text, one line for each fact: ranks compare it, and a proof is recognised by it."""
        return describe(self.resolved, self.variants)

    @property
    def parallelize_plan(self) -> dict[str, ParallelStyle]:
        """Fresh styles for torch's `parallelize_module`, by module name. Each can be applied once."""
        # Imported only here, as it needs torch; `describe` needs none.
        from shardplan.runtime.parallel.make_styles import make_styles

        return make_styles(self.resolved, self.by_name)[0]
