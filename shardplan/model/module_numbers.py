"""The numbers of modules that rules and checks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardplan.torchlib.attributes import parts_of

from .config_numbers import Number
from .forward_code import forward_reads

# On every nn.Module; they do not tell its shape.
STATE = frozenset({"training", "call_super_init", "dump_patches", *vars(nn.Module())})
DEPTH, PARTS = 3, 64  # of lists and mappings whose numbers count; longer ones are tables


def module_numbers(module: nn.Module) -> dict[str, Number]:
    """The int, float and bool attributes of the instance; of what its forward reads, also private counts, and counts in lists, mappings,
    dataclasses and namespaces, by their path (`args.n_heads`, `lengths.0`)."""
    reads = forward_reads(type(module)) - STATE
    found: dict[str, Number] = {}
    for name, value in vars(module).items():
        if isinstance(value, (int, float)) and not name.startswith("_") and name not in STATE:
            found[name] = value
        elif name in reads and name != "config":  # whose numbers are told apart
            found |= _counts_in(value, name)
    return found


def _counts_in(value: Any, path: str, depth: int = DEPTH) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield path, value
    elif depth and (parts := parts_of(value)) is not None and len(parts) <= PARTS:
        for name, part in parts.items():
            yield from _counts_in(part, f"{path}.{name}", depth - 1)
