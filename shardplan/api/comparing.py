"""Comparing two plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardplan.compiler.automatic import Derive
from shardplan.compiler.compare_programs import checkpoints, program_changes, rule_changes, section_changes
from shardplan.compiler.pipeline import Changes, Given, at_a_size, compile_variants, look_up
from shardplan.compiler.user_inputs import AnyModel, AnyPlan, Model, plan_name
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import Overlays, Plan, overlays_of, variant_name
from shardplan.core.plan_changes import CostChange, PlanDiff, RuleChange, Said, VariantCost
from shardplan.core.suggest import with_known_names
from shardplan.language import lint_plan
from shardplan.language.effective_rules import compare_fields, compare_rules
from shardplan.report.errors import raise_errors

from .cost import estimated
from .deciding import Asked
from .deriving import deriving
from .keywords import AnyMesh, model_of, sizes_of
from .one_at_a_time import one_at_a_time
from .plans import load_plan

if TYPE_CHECKING:
    from shardplan.compiler.lower import Program
    from shardplan.core.estimates import Device, TrainingStep
    from shardplan.core.sources import SourceMap


@with_known_names
@one_at_a_time
def diff_plans(
    old: AnyPlan,
    new: AnyPlan,
    model: AnyModel | None = None,
    mesh: AnyMesh | None = None,
    step: TrainingStep | None = None,
    *,
    sequence_parallel: bool | None = None,
    device: Device | str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    derive: bool = True,
) -> PlanDiff:
    """The differences between two plans. With a model, these are the bound rules that differ, the modules that are stored or run
    differently, the bytes on a rank, and the collectives of a step. Without a model, rules and sections are compared as text.

    Both plans are checked as by `compile_plan`, but not proven.

    Args:
        old, new: as for `validate`; without a model neither "auto" nor "hf".
        model, mesh: as for `validate`. Without a tp size, it is the smallest above 1 that both plans allow.
        step: the step whose memory and, for a device, least time are estimated for both plans; None estimates nothing.
        sequence_parallel: compare with (True) or without (False) the sequence-parallel section; None compares both.
        device: as for `estimate`.
        derive: as for `validate`.
        progress: called with what is being done.

    Raises:
        PlanError: a plan has errors (all of those of the first such plan), or the model cannot be found.
        ValueError: a wrong size or device.
        TypeError: a mesh or a step without a model.
    """
    sizes = sizes_of(mesh)
    if model is None:
        if sizes != MeshSizes() or step is not None:
            raise TypeError("a mesh and a step need a model")
        return _as_text(old, new)
    named = model_of(model)
    sizes.check_ep()
    how = deriving(named, sizes, derive=derive, sequence_parallel=sequence_parallel, progress=progress)
    sides = [_look_up(named, plan, sizes, how, progress) for plan in (old, new)]
    sizes = sized(sides, sizes)
    programs = [compiled(given, sizes, sequence_parallel, progress) for given in sides]
    result = _compared(*programs)
    rules = _placed(result.rules, *(given.sources for given in sides))
    cost = _Costs(named, sizes, step, device, derive, progress)
    costs = [
        {on: cost.of(plan, given, program) for on, program in made.items()}
        for plan, given, made in zip((old, new), sides, programs, strict=True)
    ]
    return replace(
        result,
        old=plan_name(old),
        new=plan_name(new),
        rules=rules,
        model=named.shown,
        sizes=sizes,
        costs=tuple(CostChange(variant_name(on), *(side.get(on) for side in costs)) for on in {**costs[0], **costs[1]}),
    )


def _as_text(old: AnyPlan, new: AnyPlan) -> PlanDiff:
    before, after = _read(old), _read(new)
    return PlanDiff(
        plan_name(old),
        plan_name(new),
        _placed(compare_rules(before.file, after.file), before.sources, after.sources),
        compare_fields(before.file, after.file),
    )


def _placed(rules: tuple[RuleChange, ...], before: SourceMap, after: SourceMap) -> tuple[RuleChange, ...]:
    """The changes, with the lines where the plans say so."""

    def found(said: tuple[Said, ...], sources: SourceMap) -> tuple[Said, ...]:
        return tuple(replace(one, location=sources.placed(one.location)) for one in said)

    return tuple(replace(one, old=found(one.old, before), new=found(one.new, after)) for one in rules)


def _read(plan: AnyPlan) -> Plan:
    """A plan whose rules do not contradict each other: of two that do, neither is what the plan says. Raises PlanError."""
    if isinstance(plan, Plan) or plan in ("auto", "hf"):
        return load_plan(plan)
    parsed = lint_plan(plan)
    raise_errors(parsed.diagnostics, parsed.sources)
    assert parsed.plan is not None
    return Plan(parsed.plan, parsed.sources)


def _look_up(
    model: Model, plan: AnyPlan, sizes: MeshSizes, derive: Derive | None, progress: Callable[[str], None]
) -> Given:
    """Raises PlanError where the model or the plan cannot be read."""
    progress(f"reading {plan_name(plan)}")
    given = look_up(model, plan, split=sizes.needs_rules, derive=derive)
    raise_errors(given.findings, given.sources)
    return given


def sized(sides: Iterable[Given], sizes: MeshSizes) -> MeshSizes:
    """The sizes, with the smallest tp above 1 that all plans allow where none is given; 1 where there is none."""
    if sizes.tp is not None:
        return sizes
    allowed = [set(at_a_size(given, sizes, _variants(given, None, sizes), seq_len=None)[1]) for given in sides]
    return replace(sizes, tp=min((size for size in set.intersection(*allowed) if size > 1), default=1))


def _variants(given: Given, sequence_parallel: bool | None, sizes: MeshSizes) -> tuple[Overlays, ...]:
    """The variants that are compared, on this mesh: with sequence parallelism where the plan has it."""
    plan = given.both[1]
    both = sequence_parallel is None and plan.has_overlay
    asked = (False, True) if both else (bool(sequence_parallel),)
    return tuple(dict.fromkeys(overlays_of(on and sizes.tp != 1, sizes) for on in asked))


def compiled(
    given: Given, sizes: MeshSizes, sequence_parallel: bool | None, progress: Callable[[str], None]
) -> dict[Overlays, Program]:
    """The programs of a plan's variants. Raises PlanError with all findings of the plan."""
    progress(f"compiling {given.both[1].name} for tp {sizes.tp}")
    made, findings = compile_variants(given, sizes, _variants(given, sequence_parallel, sizes), allow_unproven=True)
    raise_errors(findings, given.sources)
    return dict(made)


def _compared(old: dict[Overlays, Program], new: dict[Overlays, Program]) -> PlanDiff:
    both = [on for on in old if on in new]
    pairs = [(old[on], new[on]) for on in both]
    first, last = (next(iter(side.values())).resolved for side in (old, new))
    return PlanDiff(
        "",
        "",
        rules=tuple(change for a, b in pairs for change in rule_changes(a.resolved, b.resolved)),
        fields=section_changes(first, last),
        modules=tuple(change for a, b in pairs for change in program_changes(a, b)),
        checkpoints=checkpoints(first, last),
    )


class _Costs:
    """The costs of each variant of a plan."""

    def __init__(
        self,
        model: Model,
        sizes: MeshSizes,
        step: TrainingStep | None,
        device: Device | str | None,
        derive: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.model, self.sizes, self.step, self.device = model, sizes, step, device
        self.derive, self.progress = derive, progress

    def of(self, plan: AnyPlan, given: Given, program: Program) -> VariantCost:
        from shardplan.compiler.lower.expected_collectives import expected_collectives

        parameters, size = held(program, given.sources)
        made = None
        if self.step is not None:
            on = program.sequence_parallel
            self.progress(f"estimating {plan_name(plan)}")
            asked = Asked(self.model, plan, Changes(sequence_parallel=on), derive=self.derive)
            made = estimated(asked, self.sizes, self.step, self.device, self.progress)
        split = (self.sizes.tp or 1) > 1
        return VariantCost(parameters, size, expected_collectives(program.modules) if split else {}, made)


def held(program: Program, sources: SourceMap) -> tuple[int, int]:
    """The number of parameters that a rank stores under a program, and their bytes, before data parallelism."""
    from shardplan.report.program_text import module_rows

    owned = [parameter for row in module_rows(program, sources) for parameter in row.parameters]
    return sum(one.local for one in owned), sum(one.size for one in owned)
