"""The globs of the section `pipeline_parallel`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.plan import SECTIONS, PlanFile
from shardplan.core.sections import PipelineParallel

from .dead import dead
from .matching import Names
from .section_globs import elements, entries


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The modules and parameters that the section names, by full name, in the tree's order.

    Args:
        blocks: modules; a list of modules means its elements.
        first, last: modules and parameters.
        carried: modules.
    """

    blocks: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


def may_match_nothing(plan: PlanFile) -> frozenset[str]:
    """Keys of rules that are optional or apply to some configurations only. An entry of `carry` with the same text may match nothing too."""
    rules = (rule for one in plan.lineage for section in SECTIONS for rule in one.rules(section))
    return frozenset(rule.pattern for rule in rules if rule.optional or rule.when is not True)


def pipeline_parts(
    section: PipelineParallel | None, names: Names, optional: frozenset[str] = frozenset()
) -> tuple[PipelineParts, tuple[Diagnostic, ...]]:
    """What the section's globs match, and the globs that match nothing.

    Args:
        optional: globs of `carry` that may match nothing.
    """
    if section is None:
        return PipelineParts(), ()
    wrong: list[Diagnostic] = []

    def found(field: str, *, parameters: bool) -> tuple[str, ...]:
        matched: set[str] = set()
        for glob, reached, location in entries(section, field, names, wrong):
            matched.update(reached.modules, reached.parameters if parameters else ())
            if not (reached.modules or (parameters and reached.parameters)):
                if field == "carry" and glob.pattern in optional:
                    continue
                if field == "layers":  # no list
                    location = replace(location, path=location.path[:-1])
                wrong.append(dead(names, glob, location, modules_only=not parameters, listed=True))
        tree = names.tree
        return tuple(name for name in (*tree.modules, *tree.parameters) if name in matched)

    blocks = found("layers", parameters=False)
    parts = PipelineParts(
        blocks=tuple(elements(blocks, names.tree)),
        first=found("first", parameters=True),
        last=found("last", parameters=True),
        carried=found("carry", parameters=False),
    )
    return parts, tuple(wrong)
