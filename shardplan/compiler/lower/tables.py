"""The place where a tensor is moved I -> R once for all modules that read it: the block around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardplan.core.module_program import ModuleProgram
from shardplan.core.tree import ModuleTree, homes


def with_tables(tree: ModuleTree, programs: Mapping[str, ModuleProgram]) -> Mapping[str, ModuleProgram]:
    """Give each module that shares a move I -> R of an argument the module in whose calls the move happens once."""
    readers = [name for name, program in programs.items() if any(move.once for move in program.enter)]
    found = homes(tree, readers)
    count = Counter(found.values())
    several = {name for name in found if any(move.argument == "*" for move in programs[name].enter)}
    shared = {name: home for name, home in found.items() if count[home] > 1 or name in several}
    return {name: replace(p, reads_in=shared[name]) if name in shared else p for name, p in programs.items()}
