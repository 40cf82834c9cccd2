"""The JSON form of reports: one record per object, from which schemas/report.schema.json is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

VERSION = "1"  # raised when a field is removed or changes its meaning; new fields do not raise it


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a plan. Lines and columns count from 1 (in characters); they are null where the plan has no
    text."""

    file: Annotated[str, "the plan as the user named it, or <dict>, <hf>"]
    path: Annotated[tuple[str | int, ...], "keys and indices from the plan's root"]
    part: Annotated[Literal["key", "value"], "whether the key or the value of the last path element is meant"]
    line: int | None
    column: int | None
    end_line: int | None
    end_column: Annotated[int | None, "one past the last character"]
    text: Annotated[str, "what is said about this place"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    code: Annotated[str, "SPnnn; `shardplan explain CODE` prints its page"]
    severity: Literal["error", "warning"]
    message: Annotated[str, "one sentence that stands alone"]
    primary: Annotated[Place | None, "the line of the plan to change, if there is one"]
    related: Annotated[tuple[Place, ...], "other lines that have to do with it"]
    notes: Annotated[tuple[str, ...], "facts"]
    help: Annotated[str | None, "what to change"]
    modules: Annotated[tuple[str, ...], "the modules or parameters concerned"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of ranks on each mesh axis; `tp` is null where every size was meant."""

    tp: int | None
    dp_shard: int
    dp_replicate: int
    cp: int
    ep: int
    pp: int


@dataclass(frozen=True, slots=True)
class Count:
    errors: int
    warnings: int


@dataclass(frozen=True, slots=True)
class FindingsReport:
    """What `shardplan lint --json` and `shardplan validate --json` print."""

    kind: Literal["findings"]
    version: Literal["1"]
    ok: Annotated[bool, "whether there is no error"]
    plans: tuple[str, ...]
    model: Annotated[str | None, "null where plans were read without a model"]
    mesh: Mesh | None
    checked_tp: Annotated[int | None, "the tp size at which what depends on the size was checked"]
    variants: Annotated[tuple[Literal["tensor_parallel", "sequence_parallel"], ...], "the variants that were checked"]
    allowed_tp: Annotated[tuple[int, ...] | None, "the tp sizes that the model allows with this plan"]
    stages: Annotated[
        tuple[Literal["plan", "names", "structure", "layouts"], ...],
        "what was looked at: the plan alone, names and sizes in a checkpoint's files, the model's structure, layouts",
    ]
    count: Count
    findings: tuple[Finding, ...]
    secondary: Annotated[tuple[Finding, ...], "what follows from the mistakes that `findings` tells of"]


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """One tensor of the sharded model against the unsharded one's."""

    name: Annotated[str, "loss, logits or a parameter's name"]
    kind: Literal["loss", "logits", "gradient"]
    error: Annotated[
        float | None, "largest difference over largest reference value, the worst rank's; null: not a number"
    ]
    where: Annotated[str, "the rank of the worst error"]
    verdict: Annotated[Literal["equal", "differs", "unproven"], "unproven: the reference is too small to say anything"]
    dtype: Annotated[str, "the precision in which the verdict was reached"]


@dataclass(frozen=True, slots=True)
class ProofRecord:
    """One variant of the plan."""

    variant: Literal["tensor_parallel", "sequence_parallel"]
    ok: bool
    parameters: Annotated[int, "the number of parameters of the model that was compared"]
    sharded: Annotated[int, "how many of them are split over tp"]
    comparisons: tuple[ComparisonRecord, ...]


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What `shardplan verify --json` prints."""

    kind: Literal["verification"]
    version: Literal["1"]
    ok: bool
    plan: str
    model: str
    mesh: Mesh
    processes: Annotated[bool, "real processes rather than a simulation in one"]
    seconds: float
    proofs: tuple[ProofRecord, ...]
