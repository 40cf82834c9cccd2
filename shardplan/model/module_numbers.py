"""The numbers of modules that rules and checks read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .config_numbers import Number, attributes_of, is_record
from .forward_code import forward_reads

# On every nn.Module; they do not tell its shape.
STATE = frozenset({"training", "call_super_init", "dump_patches", *vars(nn.Module())})
DEPTH, PARTS = 3, 64  # of lists and mappings whose numbers count; longer ones are tables


def module_numbers(module: nn.Module) -> dict[str, Number]:
    """The int, float and bool attributes of the instance; of what its forward reads, also private counts, and counts in lists, mappings,
    dataclasses and namespaces, by their path (`args.n_heads`, `lengths.0`)."""
    found: dict[str, Number] = {}
    reads: frozenset[str] | None = None  # of few modules: to look for it takes longer than all else
    for name, value in vars(module).items():
        if name in STATE:
            continue
        if isinstance(value, (int, float)) and not name.startswith("_"):
            found[name] = value
        elif name != "config" and (type(value) is int or _parts(value) is not None):  # a configuration's are told apart
            reads = forward_reads(type(module)) if reads is None else reads
            found |= _counts_in(value, name) if name in reads else {}
    return found


def _counts_in(value: Any, path: str, depth: int = DEPTH) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield path, value
    elif depth and (parts := _parts(value)) is not None:
        for name, part in parts:
            yield from _counts_in(part, f"{path}.{name}", depth - 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a list, a mapping, a dataclass or a namespace: (name or position, part). None for other values, and for tables."""
    held = attributes_of(value) if is_record(value) else value
    if not isinstance(held, (Mapping, list, tuple)) or len(held) > PARTS:
        return None
    if not isinstance(held, Mapping):
        return enumerate(held)
    return [(key, part) for key, part in held.items() if isinstance(key, (str, int)) and "." not in str(key)]
