"""The globs of the section `pipeline_parallel`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.plan import SECTIONS, PlanFile
from shardplan.core.sections import PipelineParallel
from shardplan.language.globs import parse_glob
from shardplan.language.limits import MAX_FINDINGS

from .dead import dead
from .matching import Names
from .section_globs import elements, entry_place


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

    def found(field: str, patterns: tuple[str, ...], *, parameters: bool) -> tuple[str, ...]:
        matched: set[str] = set()
        for i, pattern in enumerate(patterns):
            if len(wrong) > MAX_FINDINGS:  # no more are shown
                break
            glob = parse_glob(pattern)
            reached = names.reach(glob)
            matched.update(reached.modules, reached.parameters if parameters else ())
            if not (reached.modules or (parameters and reached.parameters)):
                if field == "carry" and pattern in optional:
                    continue
                location = entry_place(section, field, i)
                if field == "layers":  # no list
                    location = replace(location, path=location.path[:-1])
                wrong.append(dead(names, glob, location, modules_only=not parameters, listed=True))
        tree = names.tree
        return tuple(name for name in (*tree.modules, *tree.parameters) if name in matched)

    blocks = found("layers", (section.layers,) if section.layers is not None else (), parameters=False)
    parts = PipelineParts(
        blocks=tuple(elements(blocks, names.tree)),
        first=found("first", section.first, parameters=True),
        last=found("last", section.last, parameters=True),
        carried=found("carry", section.carry, parameters=False),
    )
    return parts, tuple(wrong)
