"""All names of one parameter have the same placement and belong to one FSDP unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.layout import LayoutKind
from shardplan.core.plan import Rule
from shardplan.core.tree import parent
from shardplan.styles.packed_lengths import packed_parts

from .facts import Facts
from .field_places import field_label
from .fsdp import fully_shards, severity

DIFFERENT = Code(
    code="SP340",
    title="tied parameters with different placements",
    text="""An embedding and an output head that share their weight are one parameter, so both rules must store it in
the same way. The rows of the embedding are the output features of the head: `embedding_rowwise` for the embedding and
a `colwise` style for the head both split dim 0. With two placements the one parameter would become two: the
embedding's gradient would lack the head's part, and the loss would not show it.""",
    bad="""# shardplan validate llama-3.2-1b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.embed_tokens: embedding_rowwise
""",
    good="""# shardplan validate llama-3.2-1b.json mine.yaml --tp 2
version: "1"
name: mine
tensor_parallel:
  model.embed_tokens: embedding_rowwise
  lm_head: colwise_gather_output
""",
)

UNITS = Code(
    code="SP341",
    title="tied parameters in two FSDP units",
    text="""FSDP2 gathers the parameters of a unit together and frees them together. A parameter with two names must
belong to one unit; otherwise its second use finds it freed, and torch raises an error when the model first runs.
Leave both modules out of `units` (they then belong to the root), or name one module that contains both.""",
    bad="""# shardplan validate llama-3.2-1b.json mine.yaml --dp-shard 2
version: "1"
name: mine
tensor_parallel:
  model.embed_tokens: embedding_rowwise
  lm_head: colwise_gather_output
data_parallel:
  units: [model.layers.*, lm_head]
""",
    good="""# shardplan validate llama-3.2-1b.json mine.yaml --dp-shard 2
version: "1"
name: mine
tensor_parallel:
  model.embed_tokens: embedding_rowwise
  lm_head: colwise_gather_output
data_parallel:
  units: [model.layers.*]
""",
)

CODES = (DIFFERENT, UNITS)

BY_ROWS = {
    "embedding": "embedding_rowwise",
    "linear": "colwise_gather_output",
}  # the usual styles that split dim 0


@dataclass(frozen=True, slots=True)
class Place:
    """The placement of a parameter under one of its names, as far as the other names must agree."""

    dim: int | None
    parts: tuple[int, ...]
    computed: LayoutKind

    def __str__(self) -> str:
        if self.dim is not None:
            return f"split along dim {self.dim}" + (" in packed parts" if self.parts else "")
        return "whole" if self.computed == "I" else "whole with a partial gradient"


def check(facts: Facts) -> Iterator[Diagnostic]:
    """One finding for each group of tied names and reason."""
    for group in facts.resolved.tree.tied:
        places = {name: _place(facts, name) for name in group}
        if len(set(places.values())) > 1:
            yield _stored_differently(facts, places)
        if fully_shards(facts.resolved):
            units = {name: facts.unit_of[parent(name)] for name in group}
            if len(set(units.values())) > 1:
                yield _units(facts, units)


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
    first = next(name for name in (*(n for n, p in places.items() if p.dim is not None), *rules) if name in rules)
    return Diagnostic(
        code=DIFFERENT.code,
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
        help=_remedy(facts, places, rules),
        modules=tuple(places),
    )


def _remedy(facts: Facts, places: dict[str, Place], rules: dict[str, Rule]) -> str:
    """The line that splits the partner as the embedding is split; where there is no such line, both whole."""
    tree = facts.resolved.tree
    owners = {name: tree.parameters[name][0] for name in places if name in tree.parameters}
    lines = [
        f"`{tree.address(owner.name)}: {BY_ROWS[owner.kind]}`"
        for name, owner in owners.items()
        if owner.kind in BY_ROWS and places[name].dim != 0
    ]
    rows = any(place.dim == 0 for place in places.values())
    return (
        f"add or change {' and '.join(lines)}" if rows and lines else "keep all of them whole, or split all along dim 0"
    )


def _units(facts: Facts, units: dict[str, str]) -> Diagnostic:
    where = " and ".join(f"{name} to {unit or 'the root'}" for name, unit in units.items())
    return Diagnostic(
        code=UNITS.code,
        severity=severity(facts.resolved),
        message=f"{' and '.join(units)} are one parameter, but belong to different FSDP units",
        primary=field_label(facts.resolved.data_parallel, "units"),
        notes=(f"`units` assigns {where}",),
        help="leave both modules out of `units`: they then belong to the root's unit",
        modules=tuple(units),
    )
