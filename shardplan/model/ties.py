"""Which parameters are tied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from torch import nn

from shardplan.core.by_key import by_key


def tied_groups(module: nn.Module, names: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one Parameter, or that the model declares tied.

    The declaration is transformers' `all_tied_weights_keys`. It counts while the parameters are on the meta
    device; two different materialised Parameters are not tied, even if declared so.

    Args:
        module: the model.
        names: the full names to group -> the names without adapters, which the declaration uses. The groups, and the names in
            each group, keep this order.
    """
    actual = by_key((declared, name) for name, declared in names.items())
    parameters = {name: p for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    leader: dict[str, str] = {name: name for name in parameters}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    by_identity: dict[int, str] = {}
    for name, parameter in parameters.items():
        leader[name] = by_identity.setdefault(id(parameter), name)
    declared_pairs = (
        pair for target, source in _declared(module) for pair in product(actual.get(target, ()), actual.get(source, ()))
    )
    for target, source in declared_pairs:
        if target in parameters and source in parameters:
            unbuilt = parameters[target].is_meta and parameters[source].is_meta
            if unbuilt and parameters[target].shape == parameters[source].shape:
                leader[find(target)] = find(source)

    groups = by_key((find(name), name) for name in names if name in parameters)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _declared(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of full parameter names (target, source) from the outermost models of transformers inside
    `module`."""
    for prefix, child in module.named_modules():
        declared = vars(child).get("all_tied_weights_keys")
        if isinstance(declared, dict):
            dot = f"{prefix}." if prefix else ""
            for target, source in declared.items():
                yield f"{dot}{target}", f"{dot}{source}"
