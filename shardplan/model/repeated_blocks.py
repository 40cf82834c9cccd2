"""The outermost repeated blocks of a model, which data parallelism wraps one by one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.tree import ModuleTree, ancestors, parent

CONTAINERS = ("ModuleList", "ModuleDict")  # classes of torch.nn without a forward of their own


def repeated_blocks(tree: ModuleTree) -> tuple[str, ...]:
    """The elements of the outermost lists and dicts of modules that have parameters and share none with modules outside."""
    blocks = tuple(_blocks(tree))
    owners = {name: frozenset((module.name, *ancestors(module.name))) for name, (module, _) in tree.parameters.items()}
    tied = {
        block
        for group in tree.tied
        for block in blocks
        if len({block in owners[name] for name in group if name in owners}) == 2
    }
    filled = frozenset[str]().union(*owners.values())
    return tuple(block for block in blocks if block in filled and block not in tied)


def _blocks(tree: ModuleTree) -> Iterator[str]:
    """The blocks in the tree's order: each module before the modules inside it."""
    found = set[str]()
    for name, module in tree.modules.items():
        above = ancestors(name)
        if not name or module.class_name in CONTAINERS or not found.isdisjoint(above):
            continue
        if tree.modules[parent(name)].class_name in CONTAINERS:
            found.add(name)
            yield name
