"""Program -> torch's ParallelStyle objects."""

from __future__ import annotations

import torch

from shardplan.core.layout import P
from shardplan.core.program import ModuleProgram
from shardplan.torchlib.regime import PartialEmbedding, Regime, Shared
from shardplan.torchlib.style import ModuleStyle
from shardplan.torchlib.sums import Waiting

from .program import Program


def make_styles(program: Program) -> tuple[dict[str, ModuleStyle], Shared]:
    """Fresh styles for one model, by module name, and what they share."""
    variants = {program.sequence_parallel: program.modules}
    if program.tensor_parallel_modules is not None:
        variants[False] = program.tensor_parallel_modules
    waiting = {
        (mode, name): Waiting(module.joined)
        for mode, modules in variants.items()
        for name, module in modules.items()
        if module.joined
    }
    shared = Shared(Regime(program.sequence_parallel, _reduce_dtype(program)), _link(program), waiting)
    names = [n for n in program.resolved.tree.modules if any(n in modules for modules in variants.values())]
    styles = {
        name: ModuleStyle(
            {mode: modules.get(name) or ModuleProgram(name) for mode, modules in variants.items()}, shared
        )
        for name in names
    }
    return styles, shared


def _link(program: Program) -> PartialEmbedding | None:
    doors = [m for m in program.modules.values() if m.link == "door"]
    if not doors:
        return None
    split = frozenset(m.name for m in program.modules.values() if m.link == "source" and m.leave.src == P)
    return PartialEmbedding(split, doors[0].enter[0].dst.dim)


def _reduce_dtype(program: Program) -> torch.dtype | None:
    section = program.resolved.data_parallel
    reduce = section.mixed_precision.reduce if section and section.mixed_precision else None
    return getattr(torch, reduce) if reduce else None
