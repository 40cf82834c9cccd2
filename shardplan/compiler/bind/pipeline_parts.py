"""The globs of the section `pipeline_parallel`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardplan.core.diagnostics import Diagnostic, Location
from shardplan.core.sections import PipelineParallel
from shardplan.language.globs import parse_glob

from .dead import dead
from .matching import Names
from .section_globs import elements


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """What the section names, by full name, each in the tree's order.

    Args:
        blocks: modules; a list of modules stands for its elements.
        first, last: modules and parameters.
        carried: modules.
    """

    blocks: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


def pipeline_parts(section: PipelineParallel | None, names: Names) -> tuple[PipelineParts, tuple[Diagnostic, ...]]:
    """What the globs of the section match, and those that match nothing."""
    if section is None:
        return PipelineParts(), ()
    wrong: list[Diagnostic] = []

    def found(field: str, patterns: tuple[str, ...], *, parameters: bool) -> tuple[str, ...]:
        matched: set[str] = set()
        for i, pattern in enumerate(patterns):
            glob = parse_glob(pattern)
            reached = names.reach(glob)
            matched.update(reached.modules, reached.parameters if parameters else ())
            if not (reached.modules or (parameters and reached.parameters)):
                place = section.given.get(field) or section.location or Location("<arguments>", (field,))
                path = place.path if field == "layers" else (*place.path, i)
                location = replace(place, path=path, part="value")
                wrong.append(dead(names, glob, location, modules_only=not parameters))
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
