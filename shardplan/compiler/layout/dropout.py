"""The dropout probabilities of a model above 0, and whose random numbers compiled modules draw under TP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardplan.compiler.check.check_words import field_label
from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.module_program import Draws
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree, ancestors, named

DROPOUT = Code("SP370")


WORDS = ("drop", "jitter")  # in the names of attributes that are probabilities, or widths of noise


def active_probabilities(tree: ModuleTree) -> Mapping[str, Mapping[str, float]]:
    """Module -> attribute -> probability, for those above 0."""
    return {name: found for name, m in tree.modules.items() if (found := probabilities(m.kind, m.numbers))}


def probabilities(kind: str, numbers: Mapping[str, int | float]) -> dict[str, float]:
    """The dropout probabilities above 0: `p` of an nn.Dropout, and any float in (0, 1] whose name suggests dropping or
    a router's jitter."""
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ((kind == "dropout" and name == "p") or any(word in name.rpartition(".")[2] for word in WORDS))
    }


def is_noisy(kind: str, numbers: Mapping[str, int | float]) -> bool:
    """Whether a module other than nn.Dropout has a probability or a width of noise, of any value."""
    words = (name for name, value in numbers.items() if isinstance(value, float))
    return kind != "dropout" and any(word in name for name in words for word in WORDS)


def around_compiled(
    draws: Mapping[str, Draws], resolved: ResolvedPlan
) -> tuple[Mapping[str, Draws], tuple[Diagnostic, ...]]:
    """The draws where some modules are compiled. A graph begins with one state of the generator, so all modules inside
    must draw the same kind of numbers, else there is a finding. The outermost compiled module exchanges the state.

    Args:
        draws: whose random numbers each module draws.
        resolved: says which modules are compiled.
    """
    compiled = frozenset(resolved.compile_modules)
    found, kinds = dict(draws), defaultdict[str, set[Draws]](set)
    for name, whose in draws.items():
        region = next((above for above in (*reversed(ancestors(name)), name) if above in compiled), None)
        if region is not None and whose != "unseen":
            kinds[region].add(whose)
            found[name] = "inside"
    mixed = tuple(region for region, both in kinds.items() if len(both) > 1)
    if not mixed:
        return {**found, **{region: next(iter(kind)) for region, kind in kinds.items()}}, ()
    inside = tuple(
        name for name, whose in found.items() if whose == "inside" and not {name, *ancestors(name)}.isdisjoint(mixed)
    )
    return {}, (
        Diagnostic(
            code=DROPOUT,
            severity=Severity.ERROR,
            message=f"the plan compiles {named(mixed)} as one, which drops elements of whole values and of split ones: {named(inside)}",
            primary=field_label(resolved.compile, "modules"),
            help="compile smaller modules that have one of the two, leave these out of `compile`, or set one of the probabilities to 0",
            modules=mixed,
        ),
    )
