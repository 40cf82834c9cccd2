"""The proof in the dtypes of training: the sharded model and the unsharded one both run with FSDP2's casts, or under torch.autocast.

Two right runs differ in a lower precision: each result is rounded, and a router may choose another expert. What they may differ by is
measured on the unsharded model: by how much its results change if each weight changes by a rounding. A tensor of the sharded model that
differs by several times as much is suspicious; a suspicion counts if other weights and batches confirm it, each time for the same tensor.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardplan.compiler.check.check_words import field_label
from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.lower import Program
from shardplan.compiler.variants import bind_variants
from shardplan.core.diagnostics import Code, Diagnostic, Severity
from shardplan.core.first_few import first_few
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import NO_OVERLAYS, Overlays, PlanFile
from shardplan.core.sections import DataParallel, MixedPrecision
from shardplan.model.model_findings import reason
from shardplan.model.reduced.precision import in_dtype, with_half
from shardplan.model.reduced.reduced_model import ReducedModel
from shardplan.styles.backends import BACKENDS
from shardplan.torchlib.equality import magnitude, relative_error

from .calls import calls_of, checkpointed_by
from .compare import NEGLIGIBLE
from .failure import cause_of, is_ours
from .prove import steps_of
from .rank import Left
from .simulate import Run, results_on_ranks
from .steps import STEPS, Steps, cast, reference_of
from .threads import OnRanks, rank_threads
from .wrong_forms import amount_of

BREAKS = Code("SP424")

DRAWS = 6  # of weights and batches; one where nothing is suspicious
FACTOR = 4.0  # the sharded and the unsharded run round apart from each other, and the ranks round their parts of a sum
NOISE = 0.1  # of a weight, for another draw
LARGE = 1e4  # masks are larger; no other value comes near the largest number of float16
SMALLER = 0.25  # the factor of weights with which nothing overflows that is not a constant of the code
ITSELF = "unsharded "  # before the name of a tensor that differs from the one in float32
MISSING = re.compile(r"not implemented for '?(?:BFloat16|Half)|_cpu['\"]? not implemented")


@dataclass(frozen=True)
class LowerDtypes:
    """The dtypes in which a model trains, other than its own.

    Args:
        section: the data-parallel section, if its `mixed_precision` has one.
        autocast: that of torch.autocast around the forward.
    """

    section: DataParallel | None
    autocast: torch.dtype | None = None

    @property
    def precision(self) -> MixedPrecision | None:
        """The section's casts."""
        return self.section.mixed_precision if self.section is not None else None

    @property
    def shown(self) -> str:
        """The dtype in which a model computes, or gradients are added up."""
        precision = self.precision
        if self.autocast is not None:
            return f"{str(self.autocast).removeprefix('torch.')} under torch.autocast"
        assert precision is not None
        return precision.param or f"its own dtype, with gradients in {precision.reduce or precision.output}"

    @property
    def eps(self) -> float:
        """The largest relative rounding of the dtypes."""
        precision = self.precision
        named = (precision.param, precision.reduce, precision.output) if precision is not None else ()
        dtypes = [*(getattr(torch, name) for name in named if name), *((self.autocast,) if self.autocast else ())]
        return max(torch.finfo(dtype).eps for dtype in dtypes)


def lower_dtypes(
    reduced: ModelLayouts, plan: PlanFile, sizes: MeshSizes, on: Overlays, autocast: torch.dtype | None = None
) -> LowerDtypes | None:
    """The dtypes in which the proof of a variant has to run too: `fully_shard` casts to them, or autocast does."""
    section = bind_variants(plan, reduced.tree, sizes, (on,)).resolved[on].data_parallel
    precision = section.mixed_precision if section is not None and BACKENDS[section.backend].fully_shard else None
    casts = precision is not None and (precision.param or precision.reduce or precision.output)
    return LowerDtypes(section if casts else None, autocast) if casts or autocast is not None else None


@dataclass(frozen=True)
class Unsharded:
    """The unsharded model on one draw of weights and batches.

    Args:
        batches: of each step; for stages, of each micro-batch.
        exact: the steps in float32.
        plain: the steps in the lower dtypes.
        bounds: tensor -> what rounding explains, over its largest value.
    """

    batches: Any
    exact: Steps
    plain: Left
    bounds: Mapping[str, float]

    def itself(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of each output: how much it differs from the one in float32, and how much rounding explains."""
        errors = {ITSELF + name: error for name, error in _outputs(_errors(self.plain, [self.exact])).items()}
        return errors, {name: self.bounds.get(name.removeprefix(ITSELF), 0.0) for name in errors}


@dataclass(frozen=True)
class DtypeTrial:
    """The proof of a plan in lower dtypes.

    Args:
        reduced_model: of the programs' mesh.
        programs: variant -> its program, which is proven in float32; all on one mesh.
    """

    reduced_model: ReducedModel
    programs: Mapping[Overlays, Program]
    lower: LowerDtypes
    _known: dict[tuple[str, int], Unsharded | Diagnostic] = field(default_factory=dict)

    def findings(self) -> dict[Overlays, tuple[Diagnostic, ...]]:
        """Variant -> SP424: errors, and a warning where this process cannot run it."""
        kinds = self.kinds
        if (about := self.unsharded_finding()) is not None:
            return dict.fromkeys(self.programs, (about,))
        found: dict[Overlays, tuple[Diagnostic, ...]] = {}
        first = {(on, kind): Suspicion() for on in self.programs for kind in kinds}
        try:
            with rank_threads(self.ranks) as on_ranks:
                for on, kind in first:
                    self._look(first[on, kind], on, kind, 0, on_ranks)
        except Exception as error:  # from the model's code; ranks that raised are not called again
            found[on] = (self._raises("sharded ", error),)
        for (on, kind), suspicion in first.items():
            if on not in found and (one := self._settled(suspicion, on, kind)) is not None:
                found[on] = (one,)
        return found

    def unsharded_finding(self) -> Diagnostic | None:
        """SP424 where the unsharded model does not run in the dtypes."""
        with rank_threads(1) as on_ranks:
            tried = [self._unsharded(kind, 0, on_ranks) for kind in self.kinds]
        return next((one for one in tried if isinstance(one, Diagnostic)), None)

    def whole_findings(self) -> tuple[Diagnostic, ...]:
        """SP424 for a model of which nothing is split: it does not run in the dtypes or, a warning, differs from itself in float32."""
        if (about := self.unsharded_finding()) is not None:
            return (about,)
        for kind in self.kinds:
            suspicion = Suspicion()
            for draw in range(DRAWS):
                with rank_threads(1) as on_ranks:
                    known = self._unsharded(kind, draw, on_ranks)
                if isinstance(known, Unsharded):
                    suspicion.add(*known.itself())
                if suspicion.cleared:
                    break
            if suspicion.errors:
                return (self._itself(suspicion, kind),)
        return ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of input that the model is called with."""
        return self.reduced_model.kinds

    @property
    def ranks(self) -> int:
        """The number of simulated ranks."""
        return self.in_dtype(self._any).resolved.sizes.world_size

    @property
    def _any(self) -> Program:
        return next(iter(self.programs.values()))

    def _settled(self, suspicion: Suspicion, on: Overlays, kind: str) -> Diagnostic | None:
        """Ask further draws about what is suspicious, or was not looked at because another variant raised."""
        for draw in range(suspicion.draws, DRAWS):
            if suspicion.cleared:
                return None
            with rank_threads(1) as on_ranks:
                known = self._unsharded(kind, draw, on_ranks)
            if isinstance(known, Diagnostic):
                continue  # a draw that does not run tells nothing
            try:
                with rank_threads(self.ranks) as on_ranks:
                    self._look(suspicion, on, kind, draw, on_ranks)
            except Exception as error:  # from the model's code
                return self._raises("sharded ", error)
        if suspicion.cleared:
            return None
        return self._itself(suspicion, kind) if suspicion.itself else self._differs(suspicion)

    def _look(self, suspicion: Suspicion, on: Overlays, kind: str, draw: int, on_ranks: OnRanks) -> None:
        known = self._unsharded(kind, draw, on_ranks)
        assert isinstance(known, Unsharded)
        ranks = self.sharded(known, on, draw, on_ranks)
        itself, allowed = known.itself()
        suspicion.add({**_errors(known.plain, ranks), **itself}, {**known.bounds, **allowed})

    def _unsharded(self, kind: str, draw: int, on_ranks: OnRanks) -> Unsharded | Diagnostic:
        """The unsharded model, or why it does not run.

        Args:
            on_ranks: calls a function on one rank, unless the same was asked before.
        """
        if (kind, draw) not in self._known:
            try:
                self._known[kind, draw] = self._rounded(kind, draw, on_ranks)
            except Exception as error:  # from the model's code
                self._known[kind, draw] = self._raises("", error)
        return self._known[kind, draw]

    def _rounded(self, kind: str, draw: int, on_ranks: OnRanks) -> Unsharded | Diagnostic:
        batches, exact = self.exact(kind, draw)
        plain = self._plain(batches, exact, draw, on_ranks)
        if broken := _not_finite(exact, plain):
            smaller = self._plain(batches, exact, draw, on_ranks, scale=SMALLER)
            return self._overflows(broken, scaled=not _not_finite(exact, smaller))
        again = [self._plain(batches, exact, draw, on_ranks, again=i) for i in range(1, 3 if draw else 2)]
        bounds = {name: FACTOR * max(error, 2 * self.lower.eps) for name, error in _errors(plain, again).items()}
        return Unsharded(batches, exact, plain, bounds)

    def exact(self, kind: str, draw: int) -> tuple[Any, Steps]:
        """The batches of a draw, and the unsharded steps on them in float32."""
        under = checkpointed_by(self._any)
        if draw == 0:
            batches, exact = steps_of(self.reduced_model, kind, torch.float32, under=under)
            return batches[:STEPS], replace(exact, outputs=exact.outputs[:STEPS])
        batches = calls_of(self.reduced_model, kind, under).batches(draw)[:STEPS]
        return batches, reference_of(partial(self.built, draw), batches)

    def cast_whole(self, kind: str, draw: int, dtype: torch.dtype) -> Steps:
        """The unsharded steps of the model and inputs that are in a dtype themselves, without casts at the boundaries of units."""
        batches = calls_of(self.reduced_model, kind, checkpointed_by(self._any)).batches(draw)[:STEPS]
        model = partial(in_dtype, with_half(self.built(draw)), dtype)
        return reference_of(model, [cast(batch, dtype) for batch in batches])

    def _by_casts(self, found: Suspicion, kind: str) -> bool:
        """Whether the unsharded model differs from itself in float32 only with FSDP2's casts."""
        if self.lower.precision is None or self.lower.precision.param is None:
            return False
        for draw in range(found.draws):
            known = self._known.get((kind, draw))
            if not isinstance(known, Unsharded):
                continue
            try:
                whole = self.cast_whole(kind, draw, getattr(torch, self.lower.precision.param))
            except Exception:  # from the model's code
                return False
            errors = _errors(known.exact, [whole])
            if all(errors.get(name.removeprefix(ITSELF), 0.0) <= found.bounds[name] for name in found.errors):
                return True
        return False

    def _plain(
        self,
        batches: Any,
        exact: Steps,
        draw: int,
        on_ranks: OnRanks,
        *,
        again: int = 0,
        scale: float = 1.0,
    ) -> Left:
        """The unsharded steps in the dtypes.

        Args:
            again: above 0, each weight changes by at most a rounding, for each number by another one.
            scale: a factor of all weights.
        """
        model = with_half(self.built(draw))
        if again or scale != 1.0:
            generator = torch.Generator().manual_seed(again)
            with torch.no_grad():
                for weight in _floating(model):
                    rounding = (
                        self.lower.eps * (2 * torch.rand(weight.shape, generator=generator) - 1) if again else 0.0
                    )
                    weight.mul_(scale * (1 + rounding))
        return self.alone(model, self.in_dtype(_without_rules(self._any)), batches, exact, on_ranks)

    def alone(self, model: nn.Module, program: Program, batches: Any, exact: Steps, on_ranks: OnRanks) -> Left:
        """The steps on one rank."""
        run = Run(lambda: model, [batches], [exact])
        ((_, left),) = results_on_ranks(run, program, on_ranks, autocast=self.lower.autocast)
        return left

    def sharded(self, known: Unsharded, on: Overlays, draw: int, on_ranks: OnRanks) -> list[Left]:
        """The steps of each rank."""
        program = self.in_dtype(self.programs[on])
        replicas = program.resolved.sizes.replicas
        every = [known.batches] * replicas  # all ranks have one batch, so that their mean is its gradient
        model = with_half(self.built(draw))
        run = Run(lambda: model, every, [known.exact] * replicas)
        found = results_on_ranks(run, program, on_ranks, autocast=self.lower.autocast)
        return [left for _, left in found]

    def built(self, draw: int) -> nn.Module:
        """The reduced model with the weights of a draw."""
        model = self.reduced_model.build()
        if draw:
            generator = torch.Generator().manual_seed(zlib.crc32(b"weights", draw))
            with torch.no_grad():
                for weight in _floating(model):
                    weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
        return model

    def in_dtype(self, program: Program) -> Program:
        """The program with the section's dtypes, on as few data-parallel ranks as it allows."""
        resolved = program.resolved
        sizes, section = few_batches(resolved.sizes), resolved.data_parallel or self.lower.section
        if section is not None:
            section = replace(section, mixed_precision=self.lower.precision, cpu_offload=False)
        return replace(program, resolved=replace(resolved, sizes=sizes, data_parallel=section))

    # What is found.

    def _raises(self, who: str, error: Exception) -> Diagnostic:
        if isinstance(error, AssertionError) and is_ours(error):
            raise error
        cause, where = cause_of(error)
        if MISSING.search(str(cause)):
            return self._finding(
                f"the reduced model cannot run in {self.lower.shown} on the CPU: torch {reason(cause)}",
                (*where, "nothing is proven in this dtype"),
                None,
                Severity.WARNING,
            )
        return self._finding(
            f"in {self.lower.shown} the {who}reduced model raises {reason(cause)}",
            where,
            "let the code read the dtype of its values (`x.dtype`, `torch.finfo(x.dtype).min`), or leave this part in the "
            "model's dtype",
        )

    def _overflows(self, name: str, *, scaled: bool) -> Diagnostic:
        """The finding for a result that is not finite.

        Args:
            scaled: whether smaller weights give a finite one: the code has no constant that is too large.
        """
        return self._finding(
            f"in {self.lower.shown} the {name} of the reduced model is not finite, which it is in float32",
            ("with smaller weights it is finite",) if scaled else (),
            "use bfloat16, which has the range of float32, or `torch.finfo(x.dtype).min` in place of a constant",
            Severity.WARNING if scaled else Severity.ERROR,
        )

    def _differs(self, found: Suspicion) -> Diagnostic:
        return self._finding(
            f"in {self.lower.shown} the sharded reduced model differs from the unsharded one, but not in float32",
            found.notes(),
            "look in the code for what it does in this dtype alone; keep that module whole",
        )

    def _itself(self, found: Suspicion, kind: str) -> Diagnostic:
        if self._by_casts(found, kind):
            return self._finding(
                f"in {self.lower.shown} FSDP2's casts make the unsharded reduced model differ from itself in float32 by more than rounding",
                (
                    *found.notes(),
                    "it does not where parameters and inputs are in this dtype, without casts of the units' inputs",
                ),
                "pass positions, times and counts to modules as integers, or set `cast_forward_inputs: false`",
            )
        return self._finding(
            f"in {self.lower.shown} the unsharded reduced model differs from itself in float32 by more than rounding",
            found.notes(),
            "look in the code for what it does in this dtype alone",
            Severity.WARNING,
        )

    def _finding(
        self, message: str, notes: Sequence[str], help: str | None, severity: Severity = Severity.ERROR
    ) -> Diagnostic:
        label = field_label(self.lower.section, "mixed_precision") if self.lower.section is not None else None
        return Diagnostic(code=BREAKS, severity=severity, message=message, primary=label, notes=tuple(notes), help=help)


def few_batches(sizes: MeshSizes) -> MeshSizes:
    """The mesh without data-parallel ranks, unless they have experts of their own."""
    return replace(sizes, dp_shard=1, dp_replicate=1) if sizes.ep == 1 else sizes


def _without_rules(program: Program) -> Program:
    """The program of the unsharded model: FSDP2 alone, on one rank, with the same units."""
    resolved = program.resolved
    one = replace(
        resolved, sizes=MeshSizes(tp=1), overlays=NO_OVERLAYS, assignments={}, draws={}, on_cp=None, dp_experts=()
    )
    return Program(one, {NO_OVERLAYS: {}})


def _floating(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.is_floating_point())


def _results(left: Left | Steps) -> Iterator[tuple[str, Tensor]]:
    for step, outputs in enumerate(left.outputs):
        for name, value in outputs.items():
            yield f"output {name} of step {step + 1}", value
    yield from ((f"gradient {name}", value) for name, value in left.gradients.items())
    yield from ((f"buffer {name}", value) for name, value in left.buffers.items())


def _not_finite(reference: Steps, found: Left) -> str:
    """A tensor with elements that are finite in float32 alone, in words; empty where there is none."""
    values = dict(_results(found))
    for name, expected in _results(reference):
        value = values.get(name)
        if value is None or value.shape != expected.shape or not value.is_floating_point():
            continue
        usual = expected.isfinite() & (expected.abs() < LARGE)
        if not value[usual].isfinite().all():
            return name
    return ""


def _outputs(errors: Mapping[str, float]) -> dict[str, float]:
    return {name: error for name, error in errors.items() if name.startswith("output")}


def _errors(plain: Left | Steps, others: Iterable[Left | Steps]) -> dict[str, float]:
    """Of each tensor: the largest difference of the other runs from the unsharded one, over its largest value."""
    unsharded = dict(_results(plain))
    floor = NEGLIGIBLE * max((magnitude(x) for x in plain.gradients.values()), default=0.0)
    errors: dict[str, float] = {}
    for other in others:
        values = dict(_results(other))
        for name in unsharded.keys() | values.keys():
            if name not in values or name not in unsharded:
                errors[name] = math.inf
            elif (scale := magnitude(unsharded[name])) > floor:
                errors[name] = max(relative_error(values[name], unsharded[name], scale), errors.get(name, 0.0))
    return errors


class Suspicion:
    """The tensors that differ by more than rounding in all draws. For each the least difference counts, and the largest rounding."""

    def __init__(self) -> None:
        self.draws = 0
        self.errors: dict[str, float] = {}
        self.bounds: dict[str, float] = {}

    def add(self, errors: Mapping[str, float], bounds: Mapping[str, float]) -> None:
        """One more draw."""
        self.bounds = {name: max(bounds.get(name, 0.0), self.bounds.get(name, 0.0)) for name in errors}
        known = self.errors if self.draws else errors
        least = {name: min(error, known[name]) for name, error in errors.items() if name in known}
        self.errors = {name: error for name, error in least.items() if error > self.bounds[name]}
        self.draws += 1

    @property
    def cleared(self) -> bool:
        """At least one draw was looked at, and nothing is left."""
        return self.draws > 0 and not self.errors

    @property
    def itself(self) -> bool:
        """Whether only the unsharded model differs, from itself in float32."""
        return all(name.startswith(ITSELF) for name in self.errors)

    def notes(self) -> tuple[str, ...]:
        """The tensors that differ most."""
        worst = sorted(
            (n for n in self.errors if self.itself or not n.startswith(ITSELF)), key=lambda n: -self.errors[n]
        )
        return first_few(
            f"{n.removeprefix(ITSELF)}: {amount_of(self.errors[n])}, at most {self.bounds[n]:.1e} by rounding"
            for n in worst
        )
