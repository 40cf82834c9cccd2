"""All names of one parameter have the same placement and belong to one FSDP unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.compiler.bind.units import homes
from shardplan.core.diagnostics import Code, Diagnostic, Edit, Label, Severity
from shardplan.core.layout import LayoutKind
from shardplan.core.plan import section_at
from shardplan.core.tree import parent
from shardplan.styles.packed_lengths import packed_parts

from .check_words import field_label
from .facts import Facts
from .fsdp import fully_shards, severity

DIFFERENT = Code("SP340")
UNITS = Code("SP341")

BY_ROWS = {
    "embedding": "embedding_rowwise",
    "linear": "colwise_gather_output",
}  # the usual styles that split dim 0


@dataclass(frozen=True, slots=True)
class Place:
    """The placement of a parameter under one of its names: the part in which the other names must agree."""

    dim: int | None
    parts: tuple[int, ...]
    computed: LayoutKind

    def __str__(self) -> str:
        if self.dim is not None:
            return f"split along dim {self.dim}" + (" in packed parts" if self.parts else "")
        return "whole" if self.computed == "I" else "whole with a partial gradient"


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each pair of a group of tied names and a reason."""
    for group in facts.resolved.tree.tied:
        places = {name: _place(facts, name) for name in group}
        if len(set(places.values())) > 1:
            yield _stored_differently(facts, places)
        if fully_shards(facts.resolved):
            units = {name: facts.unit_of[parent(name)] for name in group}
            if len(set(units.values())) > 1:
                yield _units(facts, units)
    for group in facts.resolved.tree.shared if fully_shards(facts.resolved) else ():
        if "" not in (found := homes(group, facts.resolved.fsdp_units)) and len(found) > 1:
            yield _module(facts, group, tuple(found))


def _place(facts: Facts, name: str) -> Place:
    stored = facts.stored.get(name)
    if stored is None:
        return Place(None, (), "I")
    if stored.dim is None:
        return Place(None, (), stored.placement.computed)
    parts = packed_parts(stored.rule, stored.size, facts.resolved.tree.numbers) if stored.placement.packed else ()
    return Place(stored.dim, parts if isinstance(parts, tuple) else (), stored.placement.computed)


def _stored_differently(facts: Facts, places: dict[str, Place]) -> Diagnostic:
    rules = {name: facts.stored[name].rule for name in places if name in facts.stored}
    edits = _edits(facts, places)
    first = next(name for name in (*(n for n, p in places.items() if p.dim is not None), *rules) if name in rules)
    return Diagnostic(
        code=DIFFERENT,
        severity=Severity.ERROR,
        message=f"{' and '.join(places)} are one parameter, but the plan stores it in different ways: "
        + ", ".join(f"{place}" for place in places.values()),
        primary=Label(rules[first].location, f"{first} is {places[first]}"),
        related=tuple(
            Label(rule.location, f"{name} is {places[name]}")
            for name, rule in rules.items()
            if name != first and rule is not rules[first]
        ),
        notes=tuple(f"{name}: no rule, so it is whole" for name in places if name not in rules),
        help=_remedy(edits),
        modules=tuple(places),
        proposals=edits[:1],
    )


def _edits(facts: Facts, places: dict[str, Place]) -> tuple[Edit, ...]:
    """The rules that split an embedding's partners like the embedding; none if nothing is split by rows."""
    tree, edits = facts.resolved.tree, []
    for name, place in places.items():
        owner = tree.parameters[name][0] if name in tree.parameters else None
        if owner is None or owner.kind not in BY_ROWS or place.dim == 0:
            continue
        pattern = tree.address(owner.name)
        rule = facts.stored[name].rule if name in facts.stored else None
        written = rule is not None and section_at(rule.location.path) == "tensor_parallel"
        location = rule.location if rule is not None and written else None
        override = location is not None and rule is not None and rule.pattern != pattern
        edits.append(Edit("tensor_parallel", pattern, BY_ROWS[owner.kind], location, override=override))
    return tuple(edits) if any(place.dim == 0 for place in places.values()) else ()


def _remedy(edits: tuple[Edit, ...]) -> str:
    """The remedy: the line that splits the partner like the embedding; without such a line, to keep all whole or split all."""
    if not edits:
        return "keep all of them whole, or split all along dim 0"
    return f"add or change {' and '.join(f'`{edit.pattern}: {edit.value}`' for edit in edits)}"


def _units(facts: Facts, units: dict[str, str]) -> Diagnostic:
    where = " and ".join(f"{name} to {unit or 'the root'}" for name, unit in units.items())
    return Diagnostic(
        code=UNITS,
        severity=severity(facts.resolved),
        message=f"{' and '.join(units)} are one parameter, but belong to different FSDP units",
        primary=field_label(facts.resolved.data_parallel, "units"),
        notes=(f"`units` assigns {where}",),
        help="leave both modules out of `units`: they then belong to the root's unit",
        modules=tuple(units),
    )


def _module(facts: Facts, names: tuple[str, ...], units: tuple[str, ...]) -> Diagnostic:
    return Diagnostic(
        code=UNITS,
        severity=severity(facts.resolved),
        message=f"{' and '.join(names[:2])} are one module in {len(units)} FSDP units",
        primary=field_label(facts.resolved.data_parallel, "units"),
        help="give the model itself a name for it (`self.shared = module`): it then belongs to the root's unit; or leave these modules out "
        "of `units`",
        modules=names,
    )
