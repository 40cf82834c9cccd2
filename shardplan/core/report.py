"""The result of validating and verifying: data, which `report` renders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .derived_plan import DerivedPlan
from .diagnostics import Diagnostic, Severity
from .mesh import MeshSizes
from .plan import Overlay, Variant
from .sources import SourceMap

Stage = Literal["plan", "names", "structure", "layouts", "proof", "step"]
Compared = Literal["output", "gradient", "buffer", "parameter"]
Verdict = Literal["equal", "differs", "unproven"]


def count_text(diagnostics: Iterable[Diagnostic]) -> str:
    """ "2 errors, 1 warning"; "no findings" if there are none."""
    counts = Counter(d.severity for d in diagnostics)
    parts = [f"{n} {severity}{'' if n == 1 else 's'}" for severity in Severity if (n := counts[severity])]
    return ", ".join(parts) or "no findings"


def ordered(diagnostics: Iterable[Diagnostic], sources: SourceMap) -> tuple[Diagnostic, ...]:
    """Each distinct finding once: by file (in reading order), line and column; those without a place last."""
    files = {name: i for i, name in enumerate(sources.files)}

    def key(diagnostic: Diagnostic) -> tuple[int, int, int, str]:
        if diagnostic.primary is None:
            return (len(files) + 1, 0, 0, diagnostic.code)
        location = diagnostic.primary.location
        span = sources.span(location)
        line, column = (span.line, span.column) if span else (0, 0)
        return (files.get(location.file, len(files)), line, column, diagnostic.code)

    return tuple(sorted(dict.fromkeys(diagnostics), key=key))


def as_errors(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The same findings, with every warning an error (`--strict`)."""
    return tuple(replace(d, severity=Severity.ERROR) for d in diagnostics)


def of_both_variants(without: Iterable[Diagnostic], with_overlay: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The findings of a plan without and with its sequence-parallel overlay, each once. A finding of both at different
    lines names both lines; a finding of only one names the variant unless its line shows it."""
    tensor, sequence = ({_content(d): d for d in diagnostics} for diagnostics in (without, with_overlay))
    both = [_of_both(d, sequence.get(content)) for content, d in tensor.items()]
    return (*both, *(_of_overlay(d, "sequence_parallel") for content, d in sequence.items() if content not in tensor))


def with_overlay_alone(
    without: tuple[Diagnostic, ...], with_overlay: tuple[Diagnostic, ...], section: Overlay
) -> tuple[Diagnostic, ...]:
    """The findings of a plan without and with another overlay, each once. A finding that only the overlay has says
    so, unless its line shows it."""
    known = {_content(d) for d in without}
    return (*without, *(_of_overlay(d, section) for d in with_overlay if _content(d) not in known))


def _content(diagnostic: Diagnostic) -> tuple[object, ...]:
    """The content of a finding, without its place."""
    return (diagnostic.code, diagnostic.message, diagnostic.notes, diagnostic.help, diagnostic.modules)


def _of_both(diagnostic: Diagnostic, same: Diagnostic | None) -> Diagnostic:
    if same is None:
        return replace(diagnostic, notes=(*diagnostic.notes, "only without sequence parallelism"))
    if same.primary is None or same.primary == diagnostic.primary:
        return diagnostic
    label = replace(same.primary, text="the same with sequence parallelism")
    return replace(diagnostic, related=(*diagnostic.related, label))


def _of_overlay(diagnostic: Diagnostic, section: Overlay) -> Diagnostic:
    if diagnostic.primary is not None and diagnostic.primary.location.path[:1] == (section,):
        return diagnostic
    words = section.replace("_parallel", " parallelism")
    return replace(diagnostic, notes=(*diagnostic.notes, f"only with {words}"))


@dataclass(frozen=True, slots=True)
class Report:
    """The findings about one or more plans, alone or against a model.

    Args:
        diagnostics: every finding, in the order of the plan's lines.
        secondary: findings that follow from the mistakes in `diagnostics`.
        sources: the texts that the findings point into.
        plans: the names of the plans, as the user wrote them.
        model: the model's name, or None where plans were read without one.
        sizes: the requested mesh sizes; `tp` None if every size was meant.
        checked_tp: the tp size of the size-dependent checks; None if there was none.
        variants: the checked variants of the plan.
        allowed_tp: the tp sizes that the model allows with this plan, ascending; None if not computed. Layouts are
            checked at `checked_tp`; the others are only known to divide what is split.
        stages: the stages reached: the plan alone; the names and sizes in a checkpoint's files; the model's structure;
            the layouts of its reduced model; its numbers; a training step. A stage with errors is the last.
        proof: the numeric proof, if that stage was reached.
        derived: the plan, if `auto` derived it.
        step: the file of a training step that leaves on every rank what it leaves on one process.
        step_apart: state kept between steps that differs between ranks and one process, such as a rank's own losses; this is no error.
    """

    diagnostics: tuple[Diagnostic, ...] = ()
    secondary: tuple[Diagnostic, ...] = ()
    sources: SourceMap = field(default_factory=SourceMap)
    plans: tuple[str, ...] = ()
    model: str | None = None
    sizes: MeshSizes | None = None
    checked_tp: int | None = None
    variants: tuple[Variant, ...] = ()
    allowed_tp: tuple[int, ...] | None = None
    stages: tuple[Stage, ...] = ("plan",)
    proof: NumericProof | None = None
    derived: DerivedPlan | None = None
    step: str | None = None
    step_apart: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether every checked variant is proven numerically."""
        return self.ok and self.proof is not None and self.proof.ok

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not any(d.is_error for d in self.diagnostics)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(d for d in self.diagnostics if d.is_error)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        return tuple(d for d in self.diagnostics if not d.is_error)

    def __str__(self) -> str:
        lines = []
        for found in self.diagnostics:
            lines.append(f"{found.severity}[{found.code}]: {found.message}")
            lines += [f"     = help: {found.help}"] if found.help else []
        lines.append(count_text(self.diagnostics))
        return "\n".join([*lines, *self.tp_lines])

    @property
    def tp_lines(self) -> tuple[str, ...]:
        """The tp sizes that divide what the plan splits, and the other checks made; empty if not computed."""
        if self.allowed_tp is None:
            return ()
        line = f"tp: {', '.join(map(str, self.allowed_tp)) or 'none'}"
        if not self.ok:
            refused = f"; refused at {self.checked_tp}" if self.checked_tp is not None else ""
            return (f"{line} (by size alone{refused})",)
        if not any(size not in (1, self.checked_tp) for size in self.allowed_tp):
            return (line,)
        if "layouts" not in self.stages:
            return (f"{line} (by size alone)",)
        return (f"{line} (checked at {self.checked_tp}; the others by size alone)",)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of the sharded model, compared with the unsharded model's.

    Args:
        name: for an output its path in the model's result ("loss", "logits", "0"), for others the full name.
        kind: the kind of tensor.
        error: the largest difference over the largest reference value, the worst over all ranks; without a unit.
        where: the rank of the worst error ("rank 1", "dp_shard 0, tp 1").
        verdict: "unproven" if the reference is too small everywhere to decide, or there is none.
        dtype: the precision in which the verdict was reached.
        form: how a wrong tensor comes from the right one ("a partial sum", "2 times too large"); "" where it does not.
    """

    name: str
    kind: Compared
    error: float
    where: str
    verdict: Verdict
    dtype: str = "float32"
    form: str = ""


@dataclass(frozen=True, slots=True)
class VariantProof:
    """The comparison of one variant of a plan.

    Args:
        variant: its name.
        rows: the comparisons: every output, every gradient, every buffer, every parameter that a forward changes.
        parameters: the number of parameters (elements) of the compared model.
        sharded: the number of them that are split over tp.
        unreached: full names of the model's parameters and modules that no run reached and the plan does not change.
        unproven: further names that no run reached: the plan splits them, or moves values in their block.
        schedule, micro_batches: the pipeline's, if one ran.
        own_tokens: whether each rank of cp returns the results of its own tokens.
        only_with: the calls of the model that show what differs, if the plain call is right.
    """

    variant: Variant
    rows: tuple[Comparison, ...]
    parameters: int
    sharded: int
    unreached: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    schedule: str | None = None
    micro_batches: int | None = None
    own_tokens: bool = False
    only_with: tuple[str, ...] = ()

    @property
    def sharded_share(self) -> float:
        """The share of the parameters that is split over tp, 0 to 1."""
        return self.sharded / self.parameters if self.parameters else 0.0

    @property
    def worst(self) -> Comparison | None:
        """The row with the largest error; a NaN counts as the largest."""
        return max(self.rows, key=lambda row: (row.error != row.error, row.error), default=None)

    @property
    def ok(self) -> bool:
        """Nothing differs, something is equal, and everything that the plan changes was reached."""
        verdicts = {row.verdict for row in self.rows}
        return "differs" not in verdicts and "equal" in verdicts and not self.unproven


@dataclass(frozen=True, slots=True)
class PipelineProof:
    """The comparison of pipeline stages on simulated ranks with the whole model.

    Args:
        sizes: the number of blocks of the reduced model in each stage.
        carried: its modules whose output is handed on, besides the blocks' first results.
        rows: the comparisons; `Comparison.where` is the stage, and with tp the rank.
    """

    sizes: tuple[int, ...]
    carried: tuple[str, ...]
    rows: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison | None:
        """The row with the largest error; a NaN counts as the largest."""
        return max(self.rows, key=lambda row: (row.error != row.error, row.error), default=None)

    @property
    def ok(self) -> bool:
        """Nothing differs, and something is equal."""
        verdicts = {row.verdict for row in self.rows}
        return "differs" not in verdicts and "equal" in verdicts


@dataclass(frozen=True, slots=True)
class ProvenCalls:
    """The calls of the model in the proof, with one kind of input.

    Args:
        kind: the kind of input: "text", "image", ...; "own" for a user's.
        shapes: the shapes of its tensors, except the labels.
        steps: their number, in train mode.
        switched: additions in the second call: switches of the forward, padding.
        replaced: the input that replaces ids in one more call.
        left_out: calls that fail on the unsharded model, and why; nothing is proven of them.
    """

    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    steps: int
    switched: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NumericProof:
    """The numeric proof of a plan: each variant's small sharded model compared with the unsharded one.

    Args:
        sizes: the requested mesh.
        variants: one proof for each variant of the plan (or each requested one); none with pipeline stages alone and no
            processes.
        pipeline: the proof of the pipeline stages, with several pp ranks.
        calls: the calls of the model, for each kind of input.
        meshes: the meshes on which the variants ran: for several axes the smallest telling ones, or the requested one.
        processes: whether it ran in real processes rather than simulated in one.
        seconds: how long it took.
        once_in: the lower dtypes of training, in words, if the steps also ran in them.
    """

    sizes: MeshSizes
    variants: tuple[VariantProof, ...]
    processes: bool = False
    seconds: float = 0.0
    pipeline: PipelineProof | None = None
    calls: tuple[ProvenCalls, ...] = ()
    meshes: tuple[MeshSizes, ...] = ()
    once_in: str = ""

    @property
    def ok(self) -> bool:
        """Every variant is proven, and with tp or ep above 1 something is really split, over ep if there is one: whole
        copies prove nothing."""
        splits, experts = (self.sizes.tp or 1) > 1 or self.sizes.ep > 1, self.sizes.ep > 1
        staged = self.pipeline is None or self.pipeline.ok
        proven = all(
            p.ok and (p.sharded > 0 or not splits or (experts and "expert_parallel" not in p.variant))
            for p in self.variants
        )
        return proven and staged and (bool(self.variants) or (self.pipeline is not None and not splits))

    @property
    def rows(self) -> tuple[Comparison, ...]:
        staged = self.pipeline.rows if self.pipeline is not None else ()
        return (*(row for proof in self.variants for row in proof.rows), *staged)

    @property
    def worst(self) -> Comparison | None:
        """The row with the largest error of all variants."""
        return max(self.rows, key=lambda row: (row.error != row.error, row.error), default=None)
