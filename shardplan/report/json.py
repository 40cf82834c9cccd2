"""Reports as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from shardplan.core.derived_plan import DerivedPlan
from shardplan.core.diagnostics import Diagnostic, Label
from shardplan.core.estimates import Estimate, Sweep
from shardplan.core.fits import Fit
from shardplan.core.report import Comparison, NumericProof, PipelineProof, Report, VariantProof
from shardplan.core.sources import SourceMap

from .estimate_json import estimate_record, sweep_record
from .fit_json import fit_record
from .records import (
    VERSION,
    ComparisonRecord,
    Count,
    DerivedRecord,
    Finding,
    FindingsReport,
    Mesh,
    PipelineRecord,
    Place,
    ProofRecord,
    VariantRecord,
)
from .width import is_hidden


def to_json(report: Report | Estimate | Sweep | Fit, *, proof: bool = False) -> dict[str, Any]:
    """The report as JSON data, as schemas/report.schema.json describes it.

    Args:
        proof: with all that the proof of a plan compared.
    """
    if isinstance(report, Fit):
        return asdict(fit_record(report))
    if isinstance(report, Estimate | Sweep):
        return asdict(sweep_record(report) if isinstance(report, Sweep) else estimate_record(report))
    return asdict(_findings(report, proof=proof))


def json_text(data: Any) -> str:
    """JSON data as indented text, in which characters that a terminal would obey are escaped. Raises ValueError for a number that
    JSON does not have."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() and "\x7f" not in text else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char == "\n" or not is_hidden(char):
        return char
    return "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def _findings(report: Report, *, proof: bool) -> FindingsReport:
    proven = report.proof
    return FindingsReport(
        kind="findings",
        version=VERSION,
        ok=report.ok,
        plans=report.plans,
        model=report.model,
        mesh=Mesh.of(report.sizes) if report.sizes else None,
        checked_tp=report.checked_tp,
        variants=report.variants,
        allowed_tp=report.allowed_tp,
        stages=report.stages,
        proven=report.proven,
        unreached=tuple(dict.fromkeys(name for one in proven.variants for name in one.unreached)) if proven else (),
        proof=_proof(proven) if proven is not None and proof else None,
        count=Count(len(report.errors), len(report.warnings)),
        derived=_derived(report.derived) if report.derived is not None else None,
        findings=tuple(_finding(d, report.sources) for d in report.diagnostics),
        secondary=tuple(_finding(d, report.sources) for d in report.secondary),
    )


def _derived(plan: DerivedPlan) -> DerivedRecord:
    return DerivedRecord(plan.text, plan.description, plan.save, plan.split, dict(plan.whole), plan.kept)


def _finding(diagnostic: Diagnostic, sources: SourceMap) -> Finding:
    return Finding(
        code=diagnostic.code,
        severity=diagnostic.severity.value,
        message=diagnostic.message,
        primary=_place(diagnostic.primary, sources) if diagnostic.primary else None,
        related=tuple(_place(label, sources) for label in diagnostic.related),
        notes=diagnostic.notes,
        help=diagnostic.help,
        modules=diagnostic.modules,
    )


def _place(label: Label, sources: SourceMap) -> Place:
    span = sources.span(label.location)
    return Place(
        file=label.location.file,
        path=label.location.path,
        part=label.location.part,
        line=span.line if span else None,
        column=span.column if span else None,
        end_line=span.end_line if span else None,
        end_column=span.end_column if span else None,
        text=label.text,
    )


def _proof(proof: NumericProof) -> ProofRecord:
    return ProofRecord(
        mesh=Mesh.of(proof.sizes),
        processes=proof.processes,
        seconds=round(proof.seconds, 3),
        variants=tuple(map(_variant, proof.variants)),
        pipeline=_pipeline(proof.pipeline) if proof.pipeline is not None else None,
    )


def _variant(proof: VariantProof) -> VariantRecord:
    missed = (proof.unreached, proof.unproven)
    rows = tuple(map(_comparison, proof.rows))
    ran = (proof.schedule, proof.micro_batches)
    return VariantRecord(proof.variant, proof.ok, proof.parameters, proof.sharded, *missed, *ran, rows)


def _pipeline(proof: PipelineProof) -> PipelineRecord:
    return PipelineRecord(proof.ok, proof.sizes, proof.carried, tuple(map(_comparison, proof.rows)))


def _comparison(row: Comparison) -> ComparisonRecord:
    error = row.error if math.isfinite(row.error) else None
    return ComparisonRecord(row.name, row.kind, error, row.where, row.verdict, row.dtype)
