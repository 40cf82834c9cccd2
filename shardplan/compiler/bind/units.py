"""FSDP units that follow from the model: frozen modules, modules with a dtype of their own; and what is left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping

from shardplan.core.diagnostics import Diagnostic
from shardplan.core.sections import DataParallel
from shardplan.core.tree import WITHOUT_FORWARD, ModuleTree, ParameterInfo, ancestors, innermost, parent
from shardplan.styles.backends import BACKENDS

from .dead import dead
from .matching import Names
from .section_globs import entries


def ignored(section: DataParallel | None, names: Names) -> tuple[frozenset[str], tuple[Diagnostic, ...]]:
    """The parameters that data parallelism leaves alone, by full name, and the globs that match nothing."""
    if section is None:
        return frozenset(), ()
    tree = names.tree
    found = {n for n, (_, p) in tree.parameters.items() if section.frozen == "replicated" and not p.requires_grad}
    wrong: list[Diagnostic] = []
    for glob, reached, place in entries(section, "ignored", names, wrong):
        modules = frozenset(reached.modules)
        found.update(reached.parameters)
        found.update(n for n, (m, _) in tree.parameters.items() if modules & {m.name, *ancestors(m.name)})
        if not (reached.modules or reached.parameters):
            wrong.append(dead(names, glob, place, modules_only=True))
    return frozenset(found), tuple(wrong)


def units_and_parts(
    section: DataParallel | None, units: tuple[str, ...], left_out: frozenset[str], tree: ModuleTree
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The plan's units, and the further modules that become units, both in the tree's order.

    Args:
        units: the units that the plan names.
        left_out: parameters that belong to no unit.
    """
    if section is None or not BACKENDS[section.backend].parts:
        return units, ()
    frozen = _wholly_frozen(tree) if section.frozen in ("own", "root") else {}
    if section.frozen == "root":
        units = tuple(name for name in units if name not in frozen)
    parts: tuple[str, ...] = ()
    if section.frozen == "own":
        holding = {above for unit in units for above in ancestors(unit)}
        parts = tuple(
            name
            for name in frozen
            if name and name not in holding and not {name, *ancestors(name)} & set(units) and parent(name) not in frozen
        )
    parts += _of_own_dtype(tree, frozenset(units) | frozenset(parts), left_out)
    return units, tuple(name for name in tree.modules if name in frozenset(parts))


def unit_of(tree: ModuleTree, units: frozenset[str]) -> dict[str, str]:
    """The innermost unit that each module belongs to; "" is the root's, which also has each module that is in several units."""
    found: dict[str, str] = {"": ""}
    for name in tree.modules:
        found[name] = name if name in units else found[parent(name)]
    shared = {group[0] for group in tree.shared if len(homes(group, units)) > 1}
    return {name: "" if shared.intersection((name, *ancestors(name))) else unit for name, unit in found.items()}


def homes(names: Iterable[str], units: Container[str]) -> Mapping[str, None]:
    """The innermost units, or blocks, around the names of one module; "" is the root."""
    return dict.fromkeys(innermost(name, units) for name in names)


def _parameters_inside(tree: ModuleTree) -> dict[str, list[tuple[str, ParameterInfo]]]:
    """The parameters of each module and of those inside it, with their full names."""
    found: dict[str, list[tuple[str, ParameterInfo]]] = defaultdict(list)
    for name, (module, parameter) in tree.parameters.items():
        for above in (module.name, *ancestors(module.name)):
            found[above].append((name, parameter))
    return found


def _wholly_frozen(tree: ModuleTree) -> Mapping[str, None]:
    """The modules with parameters, all frozen, in the tree's order, without lists."""
    inside = _parameters_inside(tree)
    return {
        name: None
        for name, module in tree.modules.items()
        if name in inside
        and not any(p.requires_grad for _, p in inside[name])
        and module.class_name not in WITHOUT_FORWARD
        and not any(tied in {n for n, _ in inside[name]} for group in tree.tied for tied in group)
    }


def _of_own_dtype(tree: ModuleTree, units: frozenset[str], left_out: frozenset[str]) -> tuple[str, ...]:
    """In units whose trained parameters have several dtypes: the outermost modules whose parameters all have one of the
    rarer dtypes. Scalars belong to no unit.

    Modules that mix dtypes themselves, or have tied parameters, stay in their unit, which `check.fsdp` refuses.
    """
    trained = {n: p for n, (_, p) in tree.parameters.items() if p.requires_grad and p.shape and n not in left_out}
    if len({p.dtype for p in trained.values()}) < 2:
        return ()
    of, inside = unit_of(tree, units), _parameters_inside(tree)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, p in trained.items():
        counts[of[tree.owner(name)]][p.dtype] += 1
    usual = {unit: count.most_common(1)[0][0] for unit, count in counts.items() if len(count) > 1}
    tied = {name for group in tree.tied for name in group}

    def apart(name: str) -> bool:
        own = [(n, p) for n, p in inside.get(name, ()) if n in trained]
        unit, module = of[name], tree.modules[name]
        return (
            unit in usual
            and name != unit
            and bool(own)
            and {p.dtype for _, p in own} != {usual[unit]}
            and len({p.dtype for _, p in own}) == 1
            and all(of[tree.owner(n)] == unit and n not in tied for n, _ in own)
            and module.class_name not in WITHOUT_FORWARD
            and name not in tree.inside
        )

    found: list[str] = []
    for name in tree.modules:
        if name and apart(name) and not any(above in found for above in ancestors(name)):
            found.append(name)
    return tuple(found)
