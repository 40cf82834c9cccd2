"""All that is known about a plan for a model on a mesh, for a page of pictures and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardplan.compiler.automatic import Derive
from shardplan.compiler.pipeline import Changes, compile_variant, look_up
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model, plan_name
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Variant, variant_name
from shardplan.core.report import Report
from shardplan.core.schedules import SCHEDULES
from shardplan.core.suggest import with_known_names

from .check import validate
from .comparing import compiled
from .cost import estimated
from .deciding import Asked, program_or_raise
from .deriving import deriving
from .keywords import AnyMesh, model_of, sizes_of
from .one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    from shardplan.compiler.lower import Program
    from shardplan.core.estimates import Device, Estimate, TrainingStep
    from shardplan.core.stages import PipelineCut

Flow = tuple[str, tuple[tuple[str, int], ...]]  # a block, and its modules in the order in which they run


@dataclass(frozen=True)
class PlanReport:
    """What `plan_report` returns.

    Args:
        plan, model: their names.
        sizes: those of the mesh, with a tp size.
        report: that of `validate`. The other fields are set where it has no errors.
        programs: one for each variant.
        estimates: one for each variant, where a step is given.
        flow: a repeated block of the model.
        pipeline: the stages, with several pp ranks.
    """

    plan: str
    model: str
    sizes: MeshSizes
    report: Report
    programs: Mapping[Variant, Program] = field(default_factory=dict)
    estimates: Mapping[Variant, Estimate] = field(default_factory=dict)
    flow: Flow = ("", ())
    pipeline: PipelineCut | None = None


@with_known_names
@one_at_a_time
def plan_report(
    model: AnyModel,
    plan: AnyPlan,
    mesh: AnyMesh | None = None,
    step: TrainingStep | None = None,
    *,
    sequence_parallel: bool | None = None,
    device: Device | str | None = None,
    proof: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    derive: bool = True,
) -> PlanReport:
    """Check a plan, compile its variants, and estimate a step of each.

    Args:
        model, plan, mesh, sequence_parallel, proof: as for `validate`.
        step: the step whose memory and communication are estimated; None estimates nothing.
        device: as for `estimate`.
        derive: as for `validate`.
        progress: called with what is being done.

    Raises:
        PlanError: a step cannot be traced.
        ValueError: a wrong size or device.
    """
    named, sizes = model_of(model), sizes_of(mesh)
    sizes.check_ep()
    report = validate(
        named,
        plan,
        mesh,
        sequence_parallel=sequence_parallel,
        proof=proof,
        allow_unproven=True,  # it is shown, not applied
        derive=derive,
        progress=progress,
    )
    sizes = replace(sizes, tp=sizes.tp or report.checked_tp or 1)
    made = PlanReport(plan_name(plan), named.shown, sizes, report)
    if not report.ok:
        return made
    how = deriving(named, sizes, derive=derive, sequence_parallel=sequence_parallel, progress=progress)
    given = look_up(named, plan, split=sizes.needs_rules, derive=how)
    programs = {variant_name(on): one for on, one in compiled(given, sizes, sequence_parallel, progress).items()}
    pipeline = _pipeline(named, plan, sizes, step, how) if sizes.pp > 1 else None
    estimates: dict[Variant, Estimate] = {}
    if step is not None:
        for section, program in programs.items():
            progress(f"estimating, {section}")
            on = program.sequence_parallel
            asked = Asked(named, plan, Changes(sequence_parallel=on), derive=derive)
            estimates[section] = estimated(asked, sizes, step, device, progress)
    from shardplan.compiler.layout import ModelLayouts
    from shardplan.compiler.layout.call_order import block_calls

    flow: Flow = ("", ())
    reduced = ModelLayouts(given.both[0], sizes.tp or 1)
    if reduced.runs:
        flow = block_calls(reduced)
    return replace(made, programs=programs, estimates=estimates, flow=flow, pipeline=pipeline)


def _pipeline(
    model: Model, plan: AnyPlan, sizes: MeshSizes, step: TrainingStep | None, derive: Derive | None
) -> PipelineCut:
    """The stages, the same for all variants. Without a step, they are those of 1F1B.

    Raises:
        ValueError: the schedule does not work with the mesh, the micro-batches or the number of blocks.
    """
    from shardplan.compiler.pipeline_cut import pipeline_cut
    from shardplan.runtime.pipeline.layout_of_stages import stage_sizes

    resolved = program_or_raise(compile_variant(model, sizes, plan, allow_unproven=True, derive=derive)).resolved
    schedule, count = ("1f1b", None) if step is None else (step.schedule, step.micro_batches)
    return pipeline_cut(resolved, stage_sizes(resolved, SCHEDULES[schedule], sizes.pp, None, count))
