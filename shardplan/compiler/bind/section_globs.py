"""The globs of sections: data-parallel units, checkpointed and compiled modules, the parts of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardplan.core.diagnostics import Code, Diagnostic, Label, Location, Severity
from shardplan.core.plan import SECTIONS, PlanFile
from shardplan.core.sections import ActivationCheckpointing, Compile, DataParallel, PipelineParallel, Section
from shardplan.core.tree import WITHOUT_FORWARD, ModuleTree
from shardplan.language.globs import Glob, parse_glob
from shardplan.language.limits import MAX_FINDINGS

from .dead import dead
from .matching import Names, Reached

PARAMETERS = Code("SP207")


def expand(
    section: DataParallel | ActivationCheckpointing | Compile | None, field: str, names: Names, *, every: int = 1
) -> tuple[tuple[str, ...], tuple[Diagnostic, ...]]:
    """The modules that the globs of a section's field match, in the tree's order, and the findings about the globs. A
    list of modules, which has no forward of its own, means its elements.

    Args:
        every: take only each n-th of the modules that a glob matches.
    """
    if section is None:
        return (), ()
    found: set[str] = set()
    wrong: list[Diagnostic] = []
    for glob, reached, location in entries(section, field, names, wrong):
        found.update(_each(every, tuple(elements(reached.modules, names.tree)), names))
        if not reached.modules:
            wrong.append(
                _parameters(glob.pattern, location, reached.parameters)
                if reached.parameters
                else dead(names, glob, location, modules_only=True)
            )
    return tuple(name for name in names.tree.modules if name in found), tuple(wrong)


def entries(
    section: Section, field: str, names: Names, wrong: Sequence[Diagnostic]
) -> Iterator[tuple[Glob, Reached, Location]]:
    """The globs of a section's field, what each matches, and its place; it ends after more findings than are shown."""
    patterns = getattr(section, field) or ()
    for i, pattern in enumerate((patterns,) if isinstance(patterns, str) else patterns):
        if len(wrong) > MAX_FINDINGS:
            return
        glob = parse_glob(pattern)
        yield glob, names.reach(glob), entry_place(section, field, i)


def entry_place(section: Section, field: str, index: int) -> Location:
    """The place of an entry of a field that is a list."""
    place = section.given.get(field) or section.location or Location("<arguments>", (field,))
    return replace(place, path=(*place.path, index), part="value")


def wrapped(
    section: ActivationCheckpointing | Compile | None, names: Names, units: tuple[str, ...], *, every: int = 1
) -> tuple[tuple[str, ...], tuple[Diagnostic, ...]]:
    """The modules that a section wraps: as `expand`, or the data-parallel units if it does not name any."""
    if section is not None and "modules" not in section.given:
        return _each(every, units, names), ()
    return expand(section, "modules", names, every=every)


def elements(modules: tuple[str, ...], tree: ModuleTree) -> Iterator[str]:
    """The modules, with lists among them (also lists of lists) replaced by their elements."""
    for name in modules:
        if tree.modules[name].class_name in WITHOUT_FORWARD:
            yield from elements(tree.children[name], tree)
        else:
            yield name


def _each(n: int, modules: tuple[str, ...], names: Names) -> tuple[str, ...]:
    """Each n-th of the modules, in the tree's order."""
    if n == 1:
        return modules
    matched = frozenset(modules)
    return tuple(name for name in names.tree.modules if name in matched)[n - 1 :: n]


def _parameters(pattern: str, location: Location, names: tuple[str, ...]) -> Diagnostic:
    owners = pattern.rpartition(".")[0]
    return Diagnostic(
        code=PARAMETERS,
        severity=Severity.ERROR,
        message=f"`{pattern}` matches parameters, such as {names[0]}, but must match modules",
        primary=Label(location, f"matches {len(names)} parameters"),
        help=f"name the module that owns them: `{owners}`",
        modules=names,
    )


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
