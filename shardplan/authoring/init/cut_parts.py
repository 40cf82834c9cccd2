"""Finding the outputs that a model's code cuts into parts."""

from __future__ import annotations

from collections.abc import Iterable

from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.compiler.layout.solver.lengths import Lengths, features
from shardplan.core.diagnostics import PlanError
from shardplan.core.tree import ModuleTree
from shardplan.language.globs import parse_glob
from shardplan.model import FoundModel

TP = 2  # the size for which the reduced model is made; the cuts do not depend on it


def cut_parts(found: FoundModel, patterns: Iterable[str]) -> dict[str, int | list[str]]:
    """Pattern -> the parts into which the model's code cuts the output of its modules, as their number or their sizes, for
    a rule's `packed`. Modules whose output is not cut are left out.

    Args:
        found: what `Model.find` returned.
    """
    try:
        recorded = ModelLayouts(found, TP).recorded_models[0]
    except PlanError:  # without a run, cuts are unknown; validating a plan says what prevents the run
        return {}
    flow, parts = Flow(recorded.reference, recorded.tree), {}
    lengths = Lengths(flow.tree, found.tree, recorded.model)
    for pattern in patterns:
        names, modules = _modules(flow.tree, pattern), _modules(found.tree, pattern)
        made = next((product for product in flow.products.values() if product.name in names), None)
        module = found.tree.modules[modules[0]] if modules else None
        weight = module.parameter("weight") if module is not None else None
        if made is not None and module is not None and weight is not None:
            parts[pattern] = lengths.packed(flow, made, features(module, weight, "out"))
    return {pattern: said for pattern, said in parts.items() if said is not None}


def _modules(tree: ModuleTree, pattern: str) -> list[str]:
    glob = parse_glob(pattern)
    return [name for name in tree.modules if glob.matches(tree.address(name))]
