"""What two plans do differently as records of the JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardplan.core.plan import Section
from shardplan.core.plan_changes import CostChange, PlanDiff, Said, VariantCost
from shardplan.core.sources import SourceMap

from .estimate_json import estimate_record
from .records import VERSION, CollectiveRecord, EstimateRecord, Mesh
from .text import place_text


@dataclass(frozen=True, slots=True)
class SaidRecord:
    """What a plan says of a module or parameter."""

    text: Annotated[str, "the style and its options, as a plan would have them"]
    place: Annotated[str, "file:line:column"]


@dataclass(frozen=True, slots=True)
class RuleChangeRecord:
    """Modules or parameters that two plans have different rules for."""

    variant: Section
    names: Annotated[tuple[str, ...], "full names of modules and parameters; without a model, patterns"]
    old: tuple[SaidRecord, ...]
    new: tuple[SaidRecord, ...]


@dataclass(frozen=True, slots=True)
class FieldChangeRecord:
    """A field of a section that two plans set to different values."""

    name: Annotated[str, "data_parallel.backend, ...; `-` where it is not set"]
    old: Annotated[str | tuple[str, ...], "a list: the modules that it names"]
    new: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleChangeRecord:
    """Modules that are stored or run differently."""

    variant: Section
    names: tuple[str, ...]
    gone: Annotated[tuple[str, ...], "facts of the first of the modules that only the old plan has"]
    added: Annotated[tuple[str, ...], "those that only the new plan has"]


@dataclass(frozen=True, slots=True)
class CostRecord:
    """What one variant of a plan costs a rank."""

    parameters: Annotated[int, "that a rank stores, before data parallelism"]
    bytes: Annotated[int, "of these"]
    collectives: Annotated[tuple[CollectiveRecord, ...], "of a step on the tp axis"]
    estimate: Annotated[EstimateRecord | None, "null where none was asked for"]


@dataclass(frozen=True, slots=True)
class CostChangeRecord:
    """What a variant costs with each plan; null where a plan does not have it."""

    variant: Section
    old: CostRecord | None
    new: CostRecord | None


@dataclass(frozen=True, slots=True)
class CheckpointsRecord:
    """Whether what was saved with one plan can be read with the other."""

    weights: bool
    training_states: Annotated[bool, "false: not known"]
    reason: str


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What `shardplan diff --json` prints."""

    kind: Literal["diff"]
    version: Literal["1"]
    differs: Annotated[bool, "whether training would differ; without a model, whether rules or sections do"]
    old: str
    new: str
    model: Annotated[str | None, "null where plans were compared as text"]
    mesh: Mesh | None
    rules: tuple[RuleChangeRecord, ...]
    fields: tuple[FieldChangeRecord, ...]
    modules: tuple[ModuleChangeRecord, ...]
    costs: tuple[CostChangeRecord, ...]
    checkpoints: CheckpointsRecord | None


def diff_record(diff: PlanDiff) -> DiffReport:
    made = diff.checkpoints
    return DiffReport(
        "diff",
        VERSION,
        diff.differs,
        diff.old,
        diff.new,
        diff.model,
        Mesh.of(diff.sizes) if diff.sizes is not None else None,
        tuple(
            RuleChangeRecord(r.section, r.names, _said(r.old, diff.old_sources), _said(r.new, diff.new_sources))
            for r in diff.rules
        ),
        tuple(FieldChangeRecord(one.name, one.old, one.new) for one in diff.fields),
        tuple(ModuleChangeRecord(one.section, one.names, one.gone, one.added) for one in diff.modules),
        tuple(map(_change, diff.costs)),
        CheckpointsRecord(made.weights, made.states, made.reason) if made is not None else None,
    )


def _said(said: tuple[Said, ...], sources: SourceMap) -> tuple[SaidRecord, ...]:
    return tuple(SaidRecord(one.text, place_text(one.location, sources)) for one in said)


def _change(cost: CostChange) -> CostChangeRecord:
    return CostChangeRecord(cost.section, *(None if side is None else _cost(side) for side in (cost.old, cost.new)))


def _cost(cost: VariantCost) -> CostRecord:
    collectives = tuple(
        CollectiveRecord(direction, collective, count)
        for direction, counter in cost.collectives.items()
        for collective, count in counter.items()
    )
    estimate = estimate_record(cost.estimate).estimate if cost.estimate is not None else None
    return CostRecord(cost.parameters, cost.size, collectives, estimate)
