"""Dropout in compiled modules under tensor parallelism, and which probabilities of a model are above 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.tree import ModuleTree, ancestors, named

from .facts import Facts

DROPOUT = Code(
    code="SP370",
    title="dropout that tp ranks cannot draw alike",
    text="""Dropout draws random numbers. Under tensor parallelism a module that drops elements of a whole value draws the same
numbers on all tp ranks; one that drops elements of a split value (heads, a slice of the sequence) draws numbers of its
rank's own. The layout check finds out which is which, for each module, on a run of the reduced model. It refuses, in
evaluation mode too, as `.train()` may follow: a module whose own forward drops elements of both kinds of values;
dropout in code that runs only where its probability is above 0 (layer drop, a router's jitter, stochastic depth); dropout of
whole features of a split value; a probability that the reduced model does not have; a plan that could not be
proven; dropout in a module that the plan compiles, where the compiler draws the numbers.""",
    bad="""# shardplan validate gpt2.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
compile:
  modules: [transformer.h.*]
""",
    good="""# shardplan validate gpt2.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  transformer.h.*.mlp.c_fc: colwise
  transformer.h.*.mlp.c_proj: rowwise
""",
)

CODES = (DROPOUT,)

WORDS = ("drop", "jitter")  # in the names of attributes that are probabilities, or widths of noise


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for the modules that are compiled and drop elements."""
    compiled = frozenset(facts.resolved.compile_modules)
    if facts.tp in (None, 1) or not compiled:
        return
    tree = facts.resolved.tree
    active = tuple(name for name in active_probabilities(tree) if not compiled.isdisjoint((name, *ancestors(name))))
    if active:
        yield Diagnostic(
            code=DROPOUT.code,
            severity=Severity.ERROR,
            message=f"dropout is above 0 in {named(active)}, in modules that the plan compiles, at tp={facts.tp}",
            help="leave these modules out of `compile`, or set their dropout to 0",
            modules=active,
        )


def active_probabilities(tree: ModuleTree) -> Mapping[str, Mapping[str, float]]:
    """Module -> attribute -> probability, of those above 0."""
    return {name: found for name, m in tree.modules.items() if (found := probabilities(m.kind, m.numbers))}


def probabilities(kind: str, numbers: Mapping[str, int | float]) -> dict[str, float]:
    """The dropout probabilities above 0: `p` of an nn.Dropout, any float in (0, 1] whose name speaks of dropping or of a
    router's jitter."""
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ((kind == "dropout" and name == "p") or any(word in name.rpartition(".")[2] for word in WORDS))
    }
