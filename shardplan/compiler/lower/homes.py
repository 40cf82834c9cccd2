"""The home of a module: a module around it that has all its parameters present while it runs."""

from __future__ import annotations

from shardplan.core.tree import ancestors, block


def home_of(name: str, units: frozenset[str]) -> str:
    """The home of a module: the nearest FSDP unit or block that it is or is inside of; outside of these, the module
    itself.

    Args:
        units: the FSDP units.
    """
    return next((m for m in (name, *ancestors(name)) if m in units or m == block(name)), name)
