"""From module programs to torch's ParallelStyle objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from shardplan.core.by_key import by_key
from shardplan.core.layout import P
from shardplan.core.module_program import ModuleProgram, ParameterProgram
from shardplan.core.plan import ResolvedPlan, variant_name
from shardplan.core.tree import ancestors, block, home_of, parent

from .handed_out import Tokens
from .regime import PartialEmbedding, Regime, Shared
from .shared_reads import SharedReads
from .style import ModuleStyle
from .waiting_sums import Waiting

Variants = Mapping[str, Mapping[str, ModuleProgram]]  # `Program.by_name`


def make_styles(
    plan: ResolvedPlan,
    variants: Variants,
    ready: Callable[[], None] = lambda: None,
    ep: DeviceMesh | None = None,
    expert_share: float = 1.0,
    cp: DeviceMesh | None = None,
) -> tuple[dict[str, ParallelStyle], Shared]:
    """New styles for one model, by module name, and their shared state.

    Args:
        plan, variants: `resolved` and `by_name` of a `Program`.
        ready: called before a parameter's values are sent to other ranks; raises where one of them failed.
        ep, expert_share, cp: as in `Regime`.
    """
    waiting: dict[tuple[str, str | None], Waiting] = {
        (variant, name): Waiting((*module.joined, name), module.sum_rule)
        for variant, modules in variants.items()
        for name, module in modules.items()
        if module.joined
    }
    tables: dict[str | None, SharedReads] = {
        module.reads_in: SharedReads()
        for modules in variants.values()
        for module in modules.values()
        if module.reads_in is not None
    }
    experts = tuple(
        name for name in plan.tree.modules if any(name in m and m[name].experts is not None for m in variants.values())
    )
    variant = variant_name(plan.overlays)
    regime = Regime(variant, _reduce_dtype(plan), ep=ep, cp=cp, expert_share=expert_share, experts=experts)
    modules = variants[regime.variant]
    around = frozenset(a for m in modules.values() if m.link == "scope" for a in (m.name, *ancestors(m.name)))
    above = {a for m in modules.values() if m.link == "block_input" for a in ancestors(m.name)} - around
    inner = frozenset(name for name in above if plan.tree.modules[name].kind != "list")
    link = _link(modules)
    noted, tokens = _noted(variants), Tokens(seq_dim=link.seq_dim if link is not None else 1)
    shared = Shared(regime, link, around, inner, waiting, tables, tokens, noted)
    reads = _reads(plan, variants)
    styles: dict[str, ParallelStyle] = {}
    special = {*reads, *tables, *around, *inner, *noted, *([""] if cp is not None else [])}
    for name in plan.tree.modules:
        if name in special or any(name in modules for modules in variants.values()):
            programs: dict[str, ModuleProgram] = {
                variant: modules.get(name) or ModuleProgram(name) for variant, modules in variants.items()
            }
            styles[name] = ModuleStyle(programs, shared, reads.get(name, {}), ready)
    return styles, shared


def _reads(plan: ResolvedPlan, variants: Variants) -> dict[str, dict[str, list[tuple[str, ParameterProgram]]]]:
    """Block (or module outside of blocks) -> variant -> its parameters, with the names of their modules relative to it;
    only where there are several parameters. Modules of experts count as FSDP units."""
    own = (name for modules in variants.values() for name, module in modules.items() if module.over_ep)
    units = frozenset((*plan.fsdp_units, *own))
    found: dict[str, dict[str, list[tuple[str, ParameterProgram]]]] = defaultdict(lambda: defaultdict(list))
    for variant, modules in variants.items():
        for name, module in modules.items():
            home = home_of(name, units)
            found[home][variant] += [(name[len(home) :].lstrip(".") if home else name, p) for p in module.parameters]
    return {home: modes for home, modes in found.items() if any(len(reads) > 1 for reads in modes.values())}


def _noted(variants: Variants) -> frozenset[str]:
    """The modules that hand slices of tokens out of their blocks, and the enclosing modules within these blocks."""
    return frozenset(
        above
        for modules in variants.values()
        for name, module in modules.items()
        if module.outside is not None and module.outside.source.kind == "V"
        for above in (name, *ancestors(name))
        if above == name or above.startswith(block(name))
    )


def _link(modules: Mapping[str, ModuleProgram]) -> PartialEmbedding | None:
    block_inputs = [m for m in modules.values() if m.link == "block_input"]
    if not block_inputs:
        return None
    sources = ((m.name, m.leave) for m in modules.values() if m.link == "source")
    split = by_key((parent(name), name) for name, leave in sources if leave is not None and leave.src == P)
    seq_dim = block_inputs[0].enter[0].dst.dim
    assert isinstance(seq_dim, int)  # a program says which dim the sequence is
    return PartialEmbedding({name: names[0] for names in split.values() for name in names}, seq_dim)


def _reduce_dtype(plan: ResolvedPlan) -> torch.dtype | None:
    section = plan.data_parallel
    reduce = section.mixed_precision.reduce if section and section.mixed_precision else None
    return getattr(torch, reduce) if reduce else None
