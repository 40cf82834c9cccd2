"""The JSON form of reports: one record per object, from which schemas/report.schema.json is derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Section

VERSION: Final = "1"  # raised when a field is removed or changes its meaning; new fields do not raise it


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
    text: Annotated[str, "the text beside this place"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    code: Annotated[str, "SPnnn; `shardplan explain CODE` prints its page"]
    severity: Literal["error", "warning"]
    message: Annotated[str, "one sentence that stands alone"]
    primary: Annotated[Place | None, "the line of the plan to change, if there is one"]
    related: Annotated[tuple[Place, ...], "other lines that it concerns"]
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

    @classmethod
    def of(cls, sizes: MeshSizes) -> Mesh:
        return cls(sizes.tp, sizes.dp_shard, sizes.dp_replicate, sizes.cp, sizes.ep, sizes.pp)


@dataclass(frozen=True, slots=True)
class Count:
    errors: int
    warnings: int


@dataclass(frozen=True, slots=True)
class DerivedRecord:
    """A plan that `auto` derived, as no built-in plan is for the model."""

    text: Annotated[str, "the plan file, YAML"]
    description: str
    save: Annotated[str, "the command line, or the call, that writes it"]
    split: Annotated[float, "the share of the parameters inside the layers that is split over tp"]
    whole: Annotated[dict[str, float], "part of a layer that every rank has whole -> its share of these parameters"]
    kept: Annotated[str | None, "why it could not be kept for the next time"]


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """One tensor of the sharded model against the unsharded one's."""

    name: Annotated[
        str, "the path of an output in what the model returns (loss, 0, aux.1), or a parameter's or buffer's name"
    ]
    kind: Literal["output", "gradient", "buffer"]
    error: Annotated[
        float | None, "largest difference over largest reference value, the worst rank's; null: not a number"
    ]
    where: Annotated[str, "the rank of the worst error"]
    verdict: Annotated[Literal["equal", "differs", "unproven"], "unproven: the reference is too small to say anything"]
    dtype: Annotated[str, "the precision in which the verdict was reached"]


@dataclass(frozen=True, slots=True)
class VariantRecord:
    """One variant of the plan."""

    variant: Section
    ok: bool
    parameters: Annotated[int, "the number of parameters of the model that was compared"]
    sharded: Annotated[int, "how many of them are split over tp"]
    unreached: Annotated[tuple[str, ...], "what no run reached, and the plan does not touch"]
    unproven: Annotated[tuple[str, ...], "what no run reached, and the plan splits or moves values around"]
    schedule: Annotated[str | None, "of the pipeline that ran in processes; null without one"]
    micro_batches: Annotated[int | None, "of a step of that pipeline, on each data-parallel rank"]
    comparisons: tuple[ComparisonRecord, ...]


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """Pipeline stages that run one after the other, compared with the whole model."""

    ok: bool
    sizes: Annotated[tuple[int, ...], "the number of blocks of the reduced model in each stage"]
    carried: Annotated[tuple[str, ...], "its modules whose output is handed on besides the blocks' first results"]
    rows: tuple[ComparisonRecord, ...]


@dataclass(frozen=True, slots=True)
class ProofRecord:
    """All that was compared."""

    mesh: Annotated[Mesh, "on which it ran"]
    processes: Annotated[bool, "real processes rather than a simulation in one"]
    seconds: float
    variants: tuple[VariantRecord, ...]
    pipeline: Annotated[PipelineRecord | None, "null without several pp ranks"]


@dataclass(frozen=True, slots=True)
class FindingsReport:
    """What `lint`, `validate` and `verify` print with --json."""

    kind: Literal["findings"]
    version: Literal["1"]
    ok: Annotated[bool, "whether there is no error"]
    plans: tuple[str, ...]
    model: Annotated[str | None, "null where plans were read without a model"]
    mesh: Mesh | None
    checked_tp: Annotated[int | None, "the tp size at which what depends on the size was checked"]
    variants: Annotated[tuple[Section, ...], "the variants that were checked"]
    allowed_tp: Annotated[
        tuple[int, ...] | None,
        "the tp sizes that divide what is split; layouts and numbers are checked at checked_tp alone",
    ]
    stages: Annotated[
        tuple[Literal["plan", "names", "structure", "layouts", "proof"], ...],
        "what was looked at: the plan alone, names and sizes in a checkpoint's files, the model's structure, layouts, numbers",
    ]
    proven: Annotated[bool, "whether two steps of every checked variant are proven equal to the unsharded model's"]
    unreached: Annotated[tuple[str, ...], "parameters that no run of the proof reached, and the plan does not touch"]
    proof: Annotated[ProofRecord | None, "where `verify` ran"]
    count: Count
    derived: Annotated[DerivedRecord | None, "the plan, where `auto` derived it"]
    findings: tuple[Finding, ...]
    secondary: Annotated[tuple[Finding, ...], "what follows from the mistakes that `findings` reports"]


@dataclass(frozen=True, slots=True)
class AskedRecord:
    """What was estimated."""

    model: str
    plan: str
    sequence_parallel: bool
    seq_len: int
    micro_batch: Annotated[int, "sequences of a data-parallel rank in one forward"]
    precision: Annotated[str, "the dtype in which parameters, gradients and optimizer state are stored"]
    optimizer: str
    expert_load: Annotated[float, "the busiest ep rank's share of the experts' rows, over the mean of the ranks"]
    micro_batches: Annotated[int, "forwards and backwards before the optimizer steps"]
    schedule: Annotated[str, "of pipeline stages, where pp is above 1"]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """What one purpose takes of a rank's memory."""

    purpose: Annotated[str, "parameters, gradients, optimizer state, ..."]
    at_peak: Annotated[int, "bytes at the moment of the largest sum"]
    most: Annotated[int, "the most bytes at any moment"]


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """The memory of a rank while a step runs."""

    peak: Annotated[int, "bytes on the device at the moment of the largest sum"]
    phase: Literal["forward", "backward", "optimizer step"]
    module: Annotated[str, "what runs at that moment; empty: the model itself"]
    parts: tuple[MemoryPart, ...]
    host: Annotated[tuple[MemoryPart, ...], "what cpu_offload keeps on the host; at_peak is 0"]


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """One kind of collective over one mesh axis in a step."""

    axis: str
    collective: str
    calls: int
    bytes: Annotated[int, "that a rank sends with ring algorithms"]


@dataclass(frozen=True, slots=True)
class FlopsRecord:
    dtype: str
    operations: Annotated[int, "floating point operations of a rank in a step, recomputation included"]


@dataclass(frozen=True, slots=True)
class TermRecord:
    what: Literal["compute", "memory", "links in a node", "network", "pipeline"]
    seconds: Annotated[float, "at full speed, alone"]


@dataclass(frozen=True, slots=True)
class BoundRecord:
    """The least time of a step on a device."""

    device: str
    device_memory: Annotated[int, "bytes"]
    fits: Annotated[bool, "whether the peak is within the device's memory"]
    seconds: Annotated[float, "the longest of the terms"]
    by: Literal["compute", "memory", "links in a node", "network", "pipeline"]
    terms: tuple[TermRecord, ...]
    tokens_per_second: Annotated[float | None, "at most, of one device"]


@dataclass(frozen=True, slots=True)
class InFlightRecord:
    stage: int
    micro_batches: Annotated[int, "whose backward is not done"]


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """The stages of a pipeline, and what their schedule does."""

    sizes: Annotated[tuple[int, ...], "how many blocks each stage has"]
    bubble: Annotated[float, "the share of the step, over all ranks, in which they wait: 0 to 1"]
    peaks: Annotated[tuple[int, ...], "of each pp rank, the bytes at its peak"]
    fullest: Annotated[int, "the pp rank with the largest one, whose memory is estimated"]
    in_flight: Annotated[tuple[InFlightRecord, ...], "of its stages, where they keep the most"]
    busiest: Annotated[int, "the pp rank whose operations and communication are estimated"]


@dataclass(frozen=True, slots=True)
class EstimateRecord:
    """One mesh."""

    mesh: Mesh
    parameters: Annotated[int, "of the whole model"]
    held: Annotated[int, "of them, those that a rank stores"]
    memory: MemoryRecord
    flops: tuple[FlopsRecord, ...]
    traffic: tuple[TrafficRecord, ...]
    layers: Annotated[int, "of the model; 1 where they are not looked at"]
    traced: Annotated[tuple[int, ...], "the numbers of layers that were traced; the rest is extrapolated"]
    bound: Annotated[BoundRecord | None, "null without a device"]
    pipeline: Annotated[ScheduleRecord | None, "null where pp is 1"]


@dataclass(frozen=True, slots=True)
class EstimateReport:
    """What `shardplan estimate --mesh --json` prints."""

    kind: Literal["estimate"]
    version: Literal["1"]
    asked: AskedRecord
    estimate: EstimateRecord
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    mesh: Mesh
    reason: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What `shardplan estimate --sweep --json` prints."""

    kind: Literal["sweep"]
    version: Literal["1"]
    asked: AskedRecord
    devices: int
    estimates: Annotated[tuple[EstimateRecord, ...], "those that fit first, the fastest bound first"]
    refused: Annotated[tuple[RefusedRecord, ...], "meshes that the plan or the model does not allow"]
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter of a module."""

    name: Annotated[str, "its name in the module"]
    stored: Annotated[str, "the layout in which it is stored: I (whole) or V(dim)"]
    computed: Annotated[str, "the layout in which the module's code reads it: I, R, V(dim) or P"]
    parts: Annotated[tuple[int, ...], "the sizes of the packed parts along the split dim"]
    shape: Annotated[tuple[int, ...], "of the shard of the rank that has the most"]
    dtype: str
    tied_to: Annotated[str | None, "the first name of the same parameter, where it is another one's"]


@dataclass(frozen=True, slots=True)
class InputMoveRecord:
    """A move of an argument on the way into a module."""

    argument: Annotated[str | None, "null: the first one; *: every floating-point tensor"]
    source: str
    destination: str
    regather: Annotated[bool, "gathered again in backward instead of being kept"]


@dataclass(frozen=True, slots=True)
class OutputMoveRecord:
    """The move of a module's output."""

    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """What the plan does to one module."""

    name: str
    styles: Annotated[tuple[str, ...], "of its rule and of those of its parameters"]
    rules: Annotated[tuple[str, ...], "where these stand: file:line"]
    parameters: tuple[ParameterRecord, ...]
    inputs: tuple[InputMoveRecord, ...]
    output: OutputMoveRecord | None
    summed: Annotated[tuple[str, ...], "parameters in it whose partial gradients one all-reduce sums"]


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """Collectives of one kind in a training step, on the tp axis."""

    direction: Annotated[str, "forward or backward"]
    collective: Annotated[str, "all_reduce, all_gather or reduce_scatter"]
    count: int


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What `shardplan show --json` prints. Layouts: I, whole with a complete gradient; R, whole with a partial gradient; V(d), split
    in dim d; P, a partial sum."""

    kind: Literal["program"]
    version: Literal["1"]
    plan: str
    model: str
    mesh: Mesh
    sequence_parallel: bool
    modules: tuple[ModuleRecord, ...]
    collectives: tuple[CollectiveRecord, ...]
