"""The numeric proof of a plan as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardplan.core.by_key import by_key
from shardplan.core.plan import variant_words
from shardplan.core.report import Comparison, NumericProof, PipelineProof, VariantProof, Verdict

from .color import Paint, Role
from .short_names import fold_names
from .table import table
from .text import named_few
from .width import printable

VERDICTS: dict[Verdict, Role] = {"equal": "good", "differs": "error", "unproven": "warning"}
HEADER = ("  tensor", "worst error", "where", "verdict")
RANKS = {True: "real processes", False: "simulated in one process"}


def proof_text(proof: NumericProof, *, color: bool, all_rows: bool = False, width: int | None = None) -> str:
    """One table for each variant, with repeated layers on one line unless `all_rows`.

    Args:
        width: the terminal's width in columns; without it, tables are as wide as their content.
    """
    paint = Paint(color)
    parts = [_variant(one, proof, paint, all_rows, width) for one in proof.variants]
    if proof.pipeline is not None:
        parts.append(_pipeline(proof.pipeline, paint, all_rows, width))
    return "\n\n".join(parts)


def fold_rows(rows: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Join rows of repeated layers with the same verdict to one row, with their worst error."""
    named = ((re.sub(r"(?<![^.])\d+(?![^.])", "#", row.name), row) for row in rows)
    groups = by_key(((row.kind, row.verdict, row.dtype, template), row) for template, row in named)
    return tuple(folded for group in groups.values() for folded in _fold(group))


def _fold(group: Sequence[Comparison]) -> list[Comparison]:
    worst = max(group, key=lambda row: (row.error != row.error, row.error))
    return [replace(worst, name=name) for name in fold_names(row.name for row in group)]


def _variant(proof: VariantProof, whole: NumericProof, paint: Paint, all_rows: bool, width: int | None) -> str:
    rows = proof.rows if all_rows else fold_rows(proof.rows)
    whole_layers = whole.sizes.tp == 1 and proof.variant == "tensor_parallel" and proof.schedule is not None
    what = "pipeline parallel" if whole_layers else variant_words(proof.variant)
    how = f"{RANKS[whole.processes]}, schedule {proof.schedule}, {proof.micro_batches} micro-batches"
    title = f"{what}, {whole.sizes.shown} ({how if proof.schedule is not None else RANKS[whole.processes]})"
    missed = {
        "not reached, and not split": proof.unreached,
        "not reached, and so not proven (--allow-unproven)": proof.unproven,
    }
    return "\n".join(
        [
            *_compared(title, rows, proof, paint, width),
            f"{proof.parameters:,} parameters, {proof.sharded_share:.1%} of them split over tp"
            if not whole_layers
            else f"{proof.parameters:,} parameters",
            *(f"{what}: {named_few(names)} ({len(names)} in all)" for what, names in missed.items() if names),
        ]
    )


def _pipeline(proof: PipelineProof, paint: Paint, all_rows: bool, width: int | None) -> str:
    rows = proof.rows if all_rows else fold_rows(proof.rows)
    blocks = ", ".join(map(str, proof.sizes))
    title = f"pipeline parallel, {len(proof.sizes)} stages of {blocks} blocks ({RANKS[False]})"
    carried = [f"also passed on: {named_few(proof.carried)} ({len(proof.carried)} in all)"] if proof.carried else []
    return "\n".join([*_compared(title, rows, proof, paint, width), *carried])


def _compared(
    title: str, rows: Sequence[Comparison], proof: VariantProof | PipelineProof, paint: Paint, width: int | None
) -> list[str]:
    header = (*HEADER[:-1], paint("strong", HEADER[-1]))
    counts = Counter(row.verdict for row in proof.rows)
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    worst = f", worst {proof.worst.error:.1e} at {printable(proof.worst.name)}" if proof.worst else ""
    return [
        paint("strong", title),
        *table([header, *(_cells(row, paint) for row in rows)], right=(1,), width=width),
        f"{len(proof.rows)} compared: {total}{worst}",
    ]


def _cells(row: Comparison, paint: Paint) -> tuple[str, ...]:
    verdict = paint(VERDICTS[row.verdict], _verdict_word(row))
    return f"  {printable(row.name)}", f"{row.error:.1e}", row.where, verdict


def _verdict_word(row: Comparison) -> str:
    """The verdict, with the precision where it is not the usual float32."""
    return row.verdict if row.dtype == "float32" else f"{row.verdict} ({row.dtype})"
