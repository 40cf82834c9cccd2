"""Parts of the record of an applied plan as text, for the log of a run. Nothing is communicated."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.distributed.tensor import DTensor

from shardplan.core.plan import ResolvedPlan


def data_parallel_text(resolved: ResolvedPlan) -> str:
    """The backend, units and dtypes of a plan with a `data_parallel` section."""
    section = resolved.data_parallel
    assert section is not None
    parts = [section.backend, f"{len(resolved.dp_units)} units"]
    if (precision := section.mixed_precision) is not None:
        dtypes = (("param", precision.param), ("reduce", precision.reduce), ("output", precision.output))
        parts += [f"{name} {dtype}" for name, dtype in dtypes if dtype is not None]
    return ", ".join(parts)


def parameters_text(model: nn.Module) -> str:
    """The parameters' bytes on this rank and in all, and their dtypes."""
    whole = here = 0
    dtypes: dict[str, None] = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole += parameter.numel() * parameter.element_size()
        here += local.numel() * local.element_size()
        dtypes[str(parameter.dtype).removeprefix("torch.")] = None
    return f"{here:,} of {whole:,} bytes on this rank, {', '.join(dtypes)}"


def counted(counter: Counter[str]) -> str:
    """`5 all_gather, 4 reduce_scatter`."""
    return ", ".join(f"{n} {op}" for op, n in sorted(counter.items())) or "none"
