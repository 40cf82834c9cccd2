"""The errors that a proof found in a plan, as findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.compiler.layout import ModelLayouts
from shardplan.compiler.layout.model import ACCEPT, UNPROVEN_HELP
from shardplan.compiler.lower import Program
from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Code, Diagnostic, Label, Severity
from shardplan.core.first_few import first_few
from shardplan.core.plan import Assignment, Overlays, ResolvedPlan, variant_name
from shardplan.core.report import Comparison, VariantProof
from shardplan.core.tree import ancestors, block, full_name, named, parent, starred
from shardplan.language.plan_texts import value_text
from shardplan.model.distributed_code import asking

from .first_difference import FirstDifference
from .narrowing import DIFFERS, note_of, switches_in
from .prove import Proven
from .reach import touched
from .wrong_forms import amount_of

UNREACHED = Code("SP421")
ASKS = Code("SP425")

ORDER = {"output": 0, "buffer": 1, "parameter": 2, "gradient": 3}


def findings_of(
    proven: Proven, reduced: ModelLayouts, *, allow_unproven: bool = False
) -> dict[Overlays, tuple[Diagnostic, ...]]:
    """Variant -> findings about differences, and about parts that are split but were not reached.

    Args:
        reduced: the reduced model that ran.
        allow_unproven: unreached parts are a warning, not an error.
    """
    proofs = {proof.variant: proof for proof in proven.proof.variants}
    return {
        on: (
            *_differing(proofs[variant_name(on)], program.resolved, reduced, proven.first.get(on)),
            *unreached(proven.missing[on], program, reduced, allow_unproven),
        )
        for on, program in proven.programs.items()
    }


def _differing(
    proof: VariantProof,
    plan: ResolvedPlan,
    reduced: ModelLayouts,
    first: FirstDifference | None,
) -> Iterator[Diagnostic]:
    wrong = sorted((row for row in proof.rows if row.verdict == "differs"), key=lambda row: ORDER[row.kind])
    if not wrong:
        return
    known = first.modules if first is not None else ()
    names = known or [row.name for row in reversed(wrong) if row.kind != "output"]
    blamed = next((found for name in names if (found := _blamed(plan, name)) is not None), None)
    kinds = {kind: [row for row in wrong if row.kind == kind] for kind in ORDER}
    what = ", ".join(_counted(kind, len(rows)) for kind, rows in kinds.items() if rows)
    shown = first_few(_of_row(row) for rows in kinds.values() for row in sorted(rows, key=_badness))
    notes = [*([first.text] if first is not None else []), *shown]
    if proof.only_with:
        notes.append(note_of(proof.only_with))
    about = [name for row in wrong if row.kind != "output" for name in _in_model(row, reduced)]
    yield Diagnostic(
        code=DIFFERS,
        severity=Severity.ERROR,
        message=f"two steps of the sharded reduced model differ from the unsharded ones in {what}",
        primary=Label(blamed.rule.location, "the first difference" if known else "next to what differs")
        if blamed is not None
        else None,
        notes=tuple(notes),
        help=_help(proof.only_with),
        modules=tuple(dict.fromkeys(about)),
    )


def _help(only_with: Sequence[str]) -> str:
    if names := switches_in(only_with):
        return f"keep the module around the first difference whole, or refuse these calls: `refused_arguments: {value_text(names)}`"
    return "`shardplan verify` prints every tensor; keep the module around the first difference whole, or reduce or gather its input"


def _in_model(row: Comparison, reduced: ModelLayouts) -> tuple[str, ...]:
    if row.kind in ("gradient", "parameter"):
        return reduced.names_in_model([row.name])
    owner, leaf = parent(row.name), row.name.rpartition(".")[2]
    return tuple(full_name(name, leaf) for name in reduced.names_in_model([owner]))


def _counted(kind: str, count: int) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"


def _badness(row: Comparison) -> float:
    return -row.error if row.error == row.error else float("-inf")


def _of_row(row: Comparison) -> str:
    form = f", {row.form}" if row.form else ""
    return f"{row.kind} {row.name}: {amount_of(row.error)} ({row.where}){form}"


def _blamed(plan: ResolvedPlan, name: str) -> Assignment | None:
    """The rule of a module or parameter, else of the nearest module around it or in its block; only rules of axes that are above 1."""
    plans = [*([plan] if plan.sizes.splits_layers else []), *([plan.on_cp] if plan.on_cp is not None else [])]
    found = next(filter(None, (_rule_of(one, name) for one in plans)), None)
    if found is not None:
        return found
    home = full_name(block(name), "") if block(name) else None
    inside = (a for one in plans for name, a in one.assignments.items() if home is not None and name.startswith(home))
    return next(inside, None)


def unreached(
    missing: Sequence[str], program: Program, reduced: ModelLayouts, allow_unproven: bool
) -> Iterator[Diagnostic]:
    """SP421 where the plan touches parts that no run reached."""
    by_rule = by_key((_rule_of(program.resolved, name), name) for name in touched(missing, program, reduced))
    for assignment, names in by_rule.items():
        yield Diagnostic(
            code=UNREACHED,
            severity=Severity.WARNING if allow_unproven else Severity.ERROR,
            message=f"no run reaches {named(names)}: the plan is not proven there",
            primary=Label(assignment.rule.location, "is not proven") if assignment is not None else None,
            help=None if allow_unproven else f"leave it whole, or {UNPROVEN_HELP}",
            modules=reduced.names_in_model(names),
        )


def asking_for_ranks(reduced: ModelLayouts, *, allow_unproven: bool) -> Iterator[Diagnostic]:
    """SP425 where code of the model may run otherwise with a process group.

    Args:
        allow_unproven: it is a warning, not an error.
    """
    for name, line in asking(reduced.recorded_models[0].model):
        yield Diagnostic(
            code=ASKS,
            severity=Severity.WARNING if allow_unproven else Severity.ERROR,
            message=f"the code of {starred(name) or 'the model'} asks torch for its rank, or communicates: the proof runs it without ranks",
            notes=(line,),
            help=None if allow_unproven else f"make it run the same on all ranks as in one process, or {ACCEPT}",
            modules=reduced.names_in_model([name]),
        )


def _rule_of(plan: ResolvedPlan, name: str) -> Assignment | None:
    return next((plan.assignments[n] for n in (name, *ancestors(name)) if n in plan.assignments), None)
