"""PLAN `auto` where tp is 1: only data parallelism, of any module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardplan.core.diagnostics import PlanError
from shardplan.core.tree import ModuleTree

if TYPE_CHECKING:
    from torch import nn

    from shardplan.language import Parsed
    from shardplan.model import FoundModel

NAME = "data-parallel"


def unsplit_plan(found: FoundModel) -> Parsed:
    """A plan that splits no layer. Its units are the model's outermost repeated blocks that run once, by their forward,
    in a step of the reduced model. If there is no reduced model, or it does not run, all of them are units.

    FSDP2 gathers a unit's parameters around its forward. So a block that shares parameters, runs more than once or is
    called in another way belongs to the unit around it.
    """
    from shardplan.language import parse_plan
    from shardplan.model.repeated_blocks import repeated_blocks

    tree, calls = found.tree, _calls(found)
    units = [name for name in repeated_blocks(tree) if calls is None or calls.get(tree.pattern(name)) == 1]
    return parse_plan(
        {
            "version": "1",
            "name": NAME,
            "description": "Data parallelism alone, as tp is 1.",
            "data_parallel": {
                "backend": "fsdp2",
                "units": list(dict.fromkeys(_globs(tree, units))),
                "reshard_after_forward": "all_but_last",
            },
        },
        name=NAME,
    )


def _calls(found: FoundModel) -> Mapping[str, int] | None:
    """Pattern of modules -> how often the forward of one of them runs, at most, in a forward of the reduced model;
    None if unknown."""
    from shardplan.model.build_tree import tree_of
    from shardplan.model.reduced.reduced_model import make_reduced_model

    try:
        reduced = make_reduced_model(found, tp=1)
        with reduced.running():
            model = reduced.build()
            runs = [_counted(model, reduced.inputs(kind=kind)) for kind in reduced.kinds]
    except PlanError:
        return None
    reduced_tree, most = tree_of(model), dict[str, int]()
    for name in reduced_tree.modules:
        pattern = reduced_tree.pattern(name)
        most[pattern] = max(most.get(pattern, 0), *(run[name] for run in runs))
    return most


def _counted(model: nn.Module, inputs: Mapping[str, Any]) -> Counter[str]:
    import torch

    counts = Counter[str]()

    def counting(name: str) -> Callable[..., None]:
        return lambda *_: counts.update((name,))

    hooks = [module.register_forward_pre_hook(counting(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return counts


def _globs(tree: ModuleTree, units: Iterable[str]) -> Iterator[str]:
    """Patterns that match these modules and no others; the module's name where its pattern matches others too."""
    chosen = frozenset(units)
    alike = Counter(map(tree.pattern, tree.modules)) - Counter(map(tree.pattern, chosen))
    for name in tree.modules:
        if name in chosen:
            yield tree.address(name if alike[tree.pattern(name)] else tree.pattern(name))
