"""The reduced model that a user names, and the check that it represents the original."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import nn

from shardplan.core.diagnostics import Code
from shardplan.core.first_few import first_few
from shardplan.core.tree import ModuleTree
from shardplan.model.adapters import unwrapped
from shardplan.model.build_tree import tree_of
from shardplan.model.model_findings import causes, refuse

from .layers import NUMBER

NOT_REDUCED = Code("SP526")

Facts = Mapping[tuple[str, str], frozenset[Hashable]]


def named_by_user(reduced: Callable[[], nn.Module], original: ModuleTree, name: str, seed: int) -> nn.Module:
    """The model that the user's function builds on the CPU.

    Raises:
        PlanError: SP526: the function raises, returns no module, or returns one that does not represent the original.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = reduced()
    except Exception as error:  # the user's own code
        raise refuse(NOT_REDUCED, f"`reduced` of {name} raised", notes=causes(error)) from error
    if not isinstance(model, nn.Module):
        raise refuse(NOT_REDUCED, f"`reduced` of {name} returned a {type(model).__name__}, not a torch.nn.Module")
    model = unwrapped(model)
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise refuse(
            NOT_REDUCED, f"`reduced` of {name} returned a model on the meta device", help="build it on the CPU"
        )
    found = tuple(_differences(_facts(original), _facts(tree_of(model))))
    if found:
        raise refuse(
            NOT_REDUCED,
            f"`reduced` of {name} returned a model of another structure",
            notes=first_few(found),
            help="build it with the same code, with fewer and narrower layers",
        )
    return model


def _facts(tree: ModuleTree) -> Facts:
    """The facts about the modules and parameters of each pattern, over all layers: (pattern, fact) -> values."""
    facts: defaultdict[tuple[str, str], set[Hashable]] = defaultdict(set)
    for name, module in tree.modules.items():
        pattern = NUMBER.sub(".*", name)
        facts[pattern, "class"].add(module.class_name)
        for key, value in module.numbers.items():
            if isinstance(value, bool):
                facts[pattern, key].add(value)
        for parameter in module.parameters:
            facts[NUMBER.sub(".*", f"{name}.{parameter.name}"), "dimensions"].add(len(parameter.shape))
    return {key: frozenset(values) for key, values in facts.items()}


def _differences(original: Facts, reduced: Facts) -> Iterator[str]:
    for pattern, what in dict.fromkeys((*original, *reduced)):
        here, there = original.get((pattern, what)), reduced.get((pattern, what))
        shown = pattern.removeprefix(".") or "the model"
        if there is None:
            yield f"{shown}: missing" if what in ("class", "dimensions") else f"{shown}: no {what}"
        elif here is None:
            yield f"{shown}: not in the original" if what in ("class", "dimensions") else f"{shown}: {what} is new"
        elif here != there:
            wanted, given = (" and ".join(map(str, sorted(values, key=repr))) for values in (here, there))
            yield f"{shown}: {what} is {given}, but {wanted} in the original"
