"""The numeric proof of a plan: a small copy of the model, sharded, against the same copy unsharded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from shardplan.compiler.inputs import ModelSource
from shardplan.compiler.overrides import Logits
from shardplan.compiler.program import program_of
from shardplan.compiler.variants import On, Variants, any_error, bind_variants, check_variants
from shardplan.core.diagnostics import PlanError
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile
from shardplan.core.program import ModuleProgram
from shardplan.core.report import Comparison, VariantProof, VerifyReport, variant_name
from shardplan.core.tree import full_name
from shardplan.layout import ModelLayouts
from shardplan.lower import Program
from shardplan.twin import Twin

from .processes import Case, run_processes
from .simulate import simulate
from .steps import cast, reference_step


def compile_for(small: ModelLayouts, plan: PlanFile, sizes: MeshSizes, wanted: Iterable[On]) -> Variants:
    """The variants of a plan for a small copy: compiled as for the model itself, whatever its layouts are said to be.

    Raises:
        PlanError: the plan, which fits the model itself, has errors on the copy; or the copy does not run.
    """
    variants = check_variants(bind_variants(plan, small.benches[0].tree, sizes, {False, *wanted}))
    for on in wanted:
        if any_error(variants.findings[on]):
            raise PlanError(variants.findings[on])
    if sizes.tp == 1:
        return variants
    return replace(variants, layouts={on: small.check_copy(one) for on, one in variants.resolved.items()})


def prove(
    source: ModelSource,
    plan: PlanFile,
    sizes: MeshSizes,
    variants: Sequence[bool],
    *,
    logits: Logits,
    processes: bool,
    progress: Callable[[str], None],
) -> VerifyReport:
    """Prove a plan without errors.

    Args:
        variants: with the overlay (True) or without (False), or both.

    Raises:
        PlanError: no small copy of the model can be made, or the sharded one does not run.
        ValueError: a process group exists already, and the simulation needs its own.
    """
    start = time.monotonic()
    progress("building a small copy of the model")
    small = ModelLayouts(source.find(), sizes.tp)
    compiled = compile_for(small, plan, sizes, variants)
    proofs = []
    for on in variants:
        progress(f"{variant_name(on).replace('_', ' ')}, tp={sizes.tp}: comparing with the unsharded model")
        program = program_of(compiled, on, logits=logits)
        case = TwinCase(source, program, sizes) if processes else None
        with _running(compiled, on):
            rows = _settle(lambda dtype, case=case, program=program: _run(case, program, small.twin, dtype))
        proofs.append(VariantProof(variant_name(on), rows, *_counts(small.benches[0].model, program.modules)))
    return VerifyReport(
        model=source.name,
        plan=plan.name,
        sizes=sizes,
        variants=tuple(proofs),
        processes=processes,
        seconds=time.monotonic() - start,
    )


@contextmanager
def _running(compiled: Variants, on: On) -> Iterator[None]:
    """Around the sharded run: what the layout check said of a plan that does not run is why.

    Raises:
        PlanError: the model's code raised, and the layout check has findings.
    """
    try:
        yield
    except Exception as error:
        report = compiled.layouts.get(on)
        if report is None or report.ok or isinstance(error, PlanError):
            raise
        raise PlanError(report.diagnostics) from error


@dataclass(frozen=True)
class TwinCase:
    """One proof, as something that other processes can be handed."""

    source: ModelSource
    program: Program
    sizes: MeshSizes

    def cases(self, dtype: torch.dtype) -> Iterator[Case]:
        """The same for `run_processes`, for each kind of input: each process makes the small copy anew."""
        twin = ModelLayouts(self.source.find(), self.sizes.tp).twin
        for kind in twin.kinds:
            yield Case(twin.build, partial(twin.inputs, kind=kind), self.program, self.sizes, dtype)


def _run(case: TwinCase | None, program: Program, twin: Twin, dtype: torch.dtype) -> tuple[Comparison, ...]:
    """Every kind of input that the model takes; each row is the worst of them. Without a case, by simulation."""
    runs = (
        [_simulated(program, twin, kind, dtype) for kind in twin.kinds] if case is None else run_processes(case, dtype)
    )
    rows: dict[str, Comparison] = {}
    for row in (row for run in runs for row in run):
        known = rows.get(row.name)
        if known is None or _weight(row) > _weight(known):
            rows[row.name] = row
    return tuple(rows.values())


def _simulated(program: Program, twin: Twin, kind: str, dtype: torch.dtype) -> tuple[Comparison, ...]:
    inputs = cast(twin.inputs(kind=kind), dtype)
    with twin.running():
        reference = reference_step(twin.build().to(dtype), inputs)
    return simulate(twin.build().to(dtype), inputs, program, reference)


def _weight(row: Comparison) -> tuple[int, float]:
    return (("unproven", "equal", "differs").index(row.verdict), row.error)


def _settle(run: Callable[[torch.dtype], tuple[Comparison, ...]]) -> tuple[Comparison, ...]:
    """Run in float32; what differs there may be rounding, so the whole case runs again in float64, which decides."""
    rows = run(torch.float32)
    if all(row.verdict != "differs" for row in rows):
        return rows
    exact = {row.name: row for row in run(torch.float64)}
    return tuple(exact.get(row.name, row) if row.verdict == "differs" else row for row in rows)


def _counts(model: nn.Module, modules: Mapping[str, ModuleProgram]) -> tuple[int, int]:
    """(elements of all parameters, elements of those that are split), tied ones once."""
    split = {
        full_name(module.name, p.name) for module in modules.values() for p in module.parameters if p.dim is not None
    }
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if name in split)
