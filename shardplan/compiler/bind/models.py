"""A plan is for the models that it names."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.plan import PlanFile
from shardplan.core.tree import ModuleTree
from shardplan.language.globs import parse_glob
from shardplan.styles import NONE

from .matching import Names

OTHER_MODEL = Code("SP205")


def names_any(plan: PlanFile, tree: ModuleTree) -> bool:
    """Whether some rule for layers, of a plan or of one that it extends, matches something; True for one without such rules."""
    globs = [
        parse_glob(rule.pattern)
        for one in plan.lineage
        for rule in one.tensor_parallel
        if "*" in rule.pattern and rule.style != NONE
    ]
    names = Names(tree)
    return not globs or any(names.reach(glob) for glob in globs)


def other_model(plan: PlanFile, tree: ModuleTree) -> Iterator[Diagnostic]:
    """A warning where the plan names models, but neither this model's type nor its class."""
    if not plan.models or tree.model_type in plan.models or set(tree.class_names) & set(plan.models):
        return
    model = tree.class_names[0] if tree.class_names else "this model"
    typed = f" (model type {tree.model_type})" if tree.model_type else ""
    yield Diagnostic(
        code=OTHER_MODEL,
        severity=Severity.WARNING,
        message=f"the plan is for {', '.join(plan.models)}, not for {model}{typed}",
        primary=Label(Location(plan.file, ("models",), "value"), "names other models"),
        help=f"use a plan for this model, or add `{tree.model_type or model}` to `models` once it is verified",
    )
