"""The section `separate_matrices` meets a model: the matrices in each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, get_args

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.plan import NO_OVERLAYS, MatrixParts, ResolvedPlan
from shardplan.core.tree import full_name, named
from shardplan.styles.separate_matrices import LEAST, separate_matrices

from .assignments import assign, layers
from .dead import dead
from .matching import Names, Reached
from .section_globs import entries

UNFIT = Code("SP211")
Field = Literal["parts", "heads"]
HELPS: Mapping[Field, str] = {
    "parts": "name matrices whose rule under `tensor_parallel` is packed, such as `{style: packed_colwise, packed: 3}`",
    "heads": "name matrices whose rule under `tensor_parallel` splits whole heads, or give their number in the rule, such as "
    "`heads: num_key_value_heads`",
}


def separated(plan: ResolvedPlan, names: Names) -> tuple[Mapping[str, MatrixParts], tuple[Diagnostic, ...]]:
    """The matrices in each parameter that the section names, by the parameter's full name, and the findings.

    An overlay says how values move, or who has which experts: which matrices a parameter has, the rules below it say.
    """
    section = plan.separate_matrices
    if section is None:
        return {}, ()
    base = assign(layers(plan.plan, names, NO_OVERLAYS), names)
    below = replace(plan, overlays=NO_OVERLAYS, assignments=base)
    found: dict[str, MatrixParts] = {}
    wrong: list[Diagnostic] = []
    fields: tuple[Field, ...] = get_args(Field)
    for field in fields:
        for glob, reached, place in entries(section, field, names, wrong):
            if not reached:
                wrong.append(dead(names, glob, place, listed=True))
                continue
            reasons: dict[str, list[str]] = {}
            matrices = tuple(_matrices(reached, names))
            if not matrices:
                reasons["it has no matrix"] = [*reached.modules, *reached.parameters]
            for name in matrices:
                made = separate_matrices(below, name, field)
                if isinstance(made, str):
                    reasons.setdefault(made, []).append(name)
                elif found.setdefault(name, made).by != field:
                    reasons.setdefault("it is in `parts` and in `heads`", []).append(name)
            wrong += [
                Diagnostic(
                    code=UNFIT,
                    severity=Severity.ERROR,
                    message=f"{named(those, names.tree.pattern)} cannot be taken apart: {reason}",
                    primary=Label(place),
                    help="name it once" if "and in" in reason else HELPS[field],
                    modules=tuple(those),
                )
                for reason, those in reasons.items()
            ]
    return {name: found[name] for name in names.tree.parameters if name in found}, tuple(wrong)


def _matrices(reached: Reached, names: Names) -> Iterator[str]:
    """The matrices and stacks of matrices among parameters, and those of modules' own; an adapter's are none."""
    tree = names.tree
    own = (full_name(name, p.name) for name in reached.modules for p in tree.modules[name].parameters)
    for name in dict.fromkeys((*own, *reached.parameters)):
        _, parameter = tree.parameters[name]
        if len(parameter.shape) >= LEAST and parameter.adapter is None:
            yield name
