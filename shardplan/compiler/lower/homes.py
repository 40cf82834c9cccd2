"""The module where a module's parameters are together with others."""

from __future__ import annotations

from shardplan.core.tree import ancestors, block


def home_of(name: str, units: frozenset[str]) -> str:
    """The module whose parameters are all present while it runs: the block that a module is in, or an FSDP unit inside
    it; outside of blocks, the module itself.

    Args:
        units: the FSDP units.
    """
    return next((m for m in (name, *ancestors(name)) if m in units or m == block(name)), name)
