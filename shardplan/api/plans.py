"""Reading and writing plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.compiler.pipeline import Given, at_a_size
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, find_model
from shardplan.compiler.variants import Variants, wanted_variants
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Plan
from shardplan.core.report import Report
from shardplan.core.size_bounds import MOST_RANKS, check_count
from shardplan.core.sources import SourceMap
from shardplan.core.suggest import with_known_names
from shardplan.language import parse_plan
from shardplan.language.parsing import parse_text
from shardplan.report.errors import raise_errors

from .check import Check, prove_variants
from .keywords import model_of
from .one_at_a_time import one_at_a_time

if TYPE_CHECKING:
    from shardplan.authoring.init.new import NewPlan


def load_plan(plan: AnyPlan) -> Plan:
    """Read a plan. No model is needed.

    Args:
        plan: a file (a word with a path separator, or ending in .yaml, .yml or .json), the name of a built-in plan, or the
            plan's content as a dict.

    Raises:
        PlanError: the plan has errors; it has all of them.
        ValueError: for "auto" and "hf", which need a model.
    """
    if isinstance(plan, Plan):
        return plan
    if plan in ("auto", "hf"):
        raise ValueError(f"the plan {plan!r} depends on the model: give it to validate, verify or apply_plan")
    parsed = parse_plan(plan)
    raise_errors(parsed.diagnostics, parsed.sources)
    assert parsed.plan is not None
    return Plan(parsed.plan, parsed.sources, parsed.diagnostics)


@with_known_names
@one_at_a_time
def init_plan(
    model: AnyModel,
    *,
    tp: int = 2,
    sequence_parallel: bool = False,
    expert_parallel: bool = False,
    context_parallel: bool = False,
    name: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> NewPlan:
    """Write a plan for a model, from the model's structure and a run of its reduced model. All variants of the plan are checked and
    proven as by `validate`.

    What cannot be split stays whole; the plan and the result's `diagnostics` say so. Where the plan is right but for calls with certain
    switches, such as one that returns the attention maps, it refuses them (`refused_arguments`, SP535). Where a sequence-parallel section
    is wanted but none is found, or the proof refuses it, the plan has none, and SP531 in `diagnostics` says what is missing.

    Args:
        model: as for `validate`.
        tp: the tp size at which rules are tried and the plan is proven; `validate` reports which others the model allows.
        sequence_parallel: write a sequence-parallel section.
        expert_parallel: write an expert-parallel section; it is tried and proven with as many ep ranks as tp ranks.
        context_parallel: write rules for the axis cp, and the sequence-parallel section that they follow from; proven with two cp ranks.
        name: the plan's name; None is the model's type.
        progress: called with what is being done.

    Raises:
        PlanError: the model cannot be found or run; nothing can be split (SP530); rules for the axis cp are wanted but none are found
            (SP531); the experts cannot be distributed (SP533); `validate` refuses the plan that was found: it is wrong (SP420), cannot be
            proven, or no plan can be right because of the model's random numbers (SP525).
            Findings point into the plan that was found, `<init>`.
        ValueError: a tp size below 2 or above its bound.
    """
    from shardplan.authoring.init.new import NO_OVERLAY, SHOWN, new_plan, refused_overlays, refusing
    from shardplan.proof.narrowing import wrong_only_with
    from shardplan.proof.stage import nothing_proven

    check_count("tp", tp, MOST_RANKS)
    if tp < 2:
        raise ValueError(f"tp is {tp}: a plan is tried at a size of 2 or more")
    named = model_of(model)
    found, about_model = find_model(named)
    raise_errors(about_model, SourceMap())
    assert found is not None
    made = new_plan(
        found,
        tp=tp,
        sequence_parallel=sequence_parallel or context_parallel,
        expert_parallel=expert_parallel,
        context_parallel=context_parallel,
        name=name,
        progress=progress,
    )
    sizes = MeshSizes(tp=tp, ep=tp if expert_parallel else 1, cp=2 if context_parallel else 1)

    def tried(made: NewPlan) -> tuple[SourceMap, Report, Variants]:
        parsed = parse_text(made.text, file=SHOWN)
        assert parsed.plan is not None, made.text
        progress("validating")
        given = Given(named, found, parsed.plan, parsed.sources, parsed.diagnostics)
        variants, allowed = at_a_size(given, sizes, wanted_variants(parsed.plan, None, sizes), seq_len=None)
        raise_errors(variants.all_findings, parsed.sources)
        report = Report(sizes=sizes, checked_tp=tp, allowed_tp=allowed, stages=("plan", "structure"))
        asked = Check(named, made.text, sizes, progress=progress)
        return parsed.sources, *prove_variants(report, variants, given, asked)

    sources, report, variants = tried(made)
    new, refused = made, list[str]()
    while names := wrong_only_with(report.proof, variants.all_findings):  # some calls run only without others
        refused += names
        made = refusing(new, refused)
        sources, report, variants = tried(made)
    about_overlays = refused_overlays(found.name, variants.findings)
    findings = (*variants.all_findings, *about_overlays)
    if [one.code for one in about_overlays] == [NO_OVERLAY] and not context_parallel:
        without = init_plan(model, tp=tp, expert_parallel=expert_parallel, name=name, progress=progress)
        return replace(without, diagnostics=(*without.diagnostics, *findings), sources=sources)
    raise_errors(findings, sources)
    if not report.proven:
        raise_errors((nothing_proven(report.proof),), sources)
    return replace(made, diagnostics=(*made.diagnostics, *variants.all_findings))
