"""Exporting plans to other projects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardplan.compiler.user_inputs import AnyModel, AnyPlan
from shardplan.core.diagnostics import Diagnostic, Label, Severity
from shardplan.core.first_few import first_few
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import ResolvedPlan
from shardplan.core.report import Comparison, Report, ordered
from shardplan.core.suggest import with_known_names

from .deciding import Asked
from .keywords import model_of
from .one_at_a_time import one_at_a_time

To = Literal["transformers", "torch"]


@dataclass(frozen=True, slots=True)
class ExportedPlan:
    """What `export_plan` returns.

    Args:
        text: a file for the target: JSON of a `DistributedConfig`, or a Python module with `PLAN`. None where it is refused.
        entries: names with `*` for list indices -> the target's words.
        rows: the values that were compared with the unsharded model, in the target's own code; empty where it was not run.
        report: what cannot be exported, or differs in the target.
    """

    text: str | None
    entries: dict[str, str]
    rows: tuple[Comparison, ...]
    report: Report

    @property
    def shown(self) -> str:
        """What is known about the exported plan, in words."""
        if not self.rows:
            return "not run there: nothing shows that it computes the same"
        told = [row.error for row in self.rows if row.verdict != "unproven"]
        zero = f"; {len(self.rows) - len(told)} more are zero in both" if len(told) < len(self.rows) else ""
        return f"run there: {len(told)} tensors as in the unsharded model (largest difference {max(told):.1e}){zero}"

    @property
    def ok(self) -> bool:
        return self.text is not None and self.report.ok


@with_known_names
@one_at_a_time
def export_plan(
    model: AnyModel,
    plan: AnyPlan,
    to: To,
    *,
    tp: int = 2,
    run: bool = True,
    derive: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> ExportedPlan:
    """Write the tensor-parallel section of a plan in another project's words, and run it in that project's own code: a step of the
    reduced model on `tp` processes (gloo, on the CPU) is compared with the unsharded model, in the loss, all outputs and every
    gradient. A plan that cannot be exported, raises there or differs is refused (SP549); a difference where two steps accumulate is a warning.

    Args:
        model, plan: as for `validate`.
        to: "transformers" for the `tp_plan` of a `DistributedConfig`; "torch" for a dictionary for `parallelize_module`.
        tp: the tp size to compile for and to run at.
        run: run the plan in the target's code. If False, nothing shows that the target computes the same, and a warning says so.
        derive, progress: as for `validate`.

    Raises:
        ValueError: another target; a tp size below 2; with `run`, a model that other processes cannot find. TypeError: as for `validate`.
    """
    from shardplan.export import TARGETS, lower_to, run_target
    from shardplan.export.targets import CANNOT_CROSS

    if to not in TARGETS:
        raise ValueError(f"there is no target {to!r}: the targets are {', '.join(TARGETS)}")
    if type(tp) is not int or tp < 2:
        raise ValueError(f"tp must be a whole number, 2 or more, not {tp!r}")
    source, target = model_of(model), TARGETS[to]
    progress("compiling the plan")
    compiled = Asked(source, plan, derive=derive).compiled(MeshSizes(tp=tp), progress)
    sources = compiled.given.sources

    def report(*findings: Diagnostic) -> Report:
        return Report(ordered((*compiled.findings, *findings), sources), sources=sources)

    if compiled.program is None:
        return ExportedPlan(None, {}, (), report())
    built: Any = source.find().build()
    own = getattr(built, "tp_plan", None) if to == "transformers" else None
    if to == "transformers" and not callable(getattr(built, "save_pretrained", None)):
        message = f"{type(built).__name__} is no model of transformers, whose code applies a `tp_plan`"
        return ExportedPlan(None, {}, (), report(Diagnostic(CANNOT_CROSS, Severity.ERROR, message, help="--to torch")))
    made = lower_to(target, compiled.program, own or {})
    if made.findings:
        return ExportedPlan(None, made.entries, (), report(*made.findings))
    text = target.write(made.entries, tp)
    if not run:
        message = f"the export was not run: nothing tells that {target.shown} computes the same"
        return ExportedPlan(text, made.entries, (), report(Diagnostic(CANNOT_CROSS, Severity.WARNING, message)))
    progress(f"running it in {target.shown} on {tp} processes")
    try:
        rows, accumulated = run_target(source, to, made.entries, tp)
    except RuntimeError as error:
        failed = Diagnostic(CANNOT_CROSS, Severity.ERROR, f"{target.shown} cannot run the export: {error}")
        return ExportedPlan(None, made.entries, (), report(failed))
    what = f"{target.shown} computes something else than the unsharded model"
    resolved = compiled.program.resolved
    if (found := _differing(rows, what, resolved)) is not None:
        return ExportedPlan(None, made.entries, rows, report(Diagnostic(CANNOT_CROSS, Severity.ERROR, *found)))
    what = "gradients that accumulate over micro-batches differ there: each optimizer step must have one backward"
    if (found := _differing(accumulated, what, resolved)) is not None:
        warning = Diagnostic(CANNOT_CROSS, Severity.WARNING, *found)
        return ExportedPlan(text, made.entries, rows, report(warning))
    return ExportedPlan(text, made.entries, rows, report())


def _differing(
    rows: tuple[Comparison, ...], what: str, resolved: ResolvedPlan
) -> tuple[str, Label | None, tuple[()], tuple[str, ...]] | None:
    """A finding's message, the rule of the parameter that differs most, its related lines and notes; None where nothing differs."""
    wrong = sorted((row for row in rows if row.verdict == "differs"), key=lambda row: -row.error)
    notes = first_few(f"{row.kind} {row.name}: {row.error:.1e} ({row.where})" for row in wrong)
    owners = [(row.name, row.name.rpartition(".")[0]) for row in wrong if row.kind == "gradient"]
    ruled = [resolved.assignments[name] for names in owners for name in names if name in resolved.assignments]
    place = Label(ruled[0].rule.location, "its gradient differs") if ruled else None
    return (f"{what}: {len(wrong)} of {len(rows)} tensors", place, (), notes) if wrong else None
