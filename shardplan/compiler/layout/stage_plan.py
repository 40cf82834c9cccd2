"""A plan's pipeline stages on the reduced model, and what they mean for the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.compiler.bind import bind
from shardplan.compiler.check.check_words import field_label
from shardplan.core.diagnostics import Code, Diagnostic, Label, PlanError, Severity
from shardplan.core.plan import PlanFile, ResolvedPlan
from shardplan.core.sections import PipelineParallel
from shardplan.core.stages import HandedOn
from shardplan.core.tree import ancestors, full_name, named
from shardplan.model.reduced.trace import Event
from shardplan.torchlib.modes import reduced_runs

from .drawn_choices import stage_finding
from .model import ModelLayouts, unproven
from .stage_check import CutFacts, cut_facts
from .stage_reads import Crossing, StageParts, StageRun, outermost, stage_root


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """What the recorded runs of the reduced model show of a plan's stages.

    Args:
        resolved: the plan bound to the reduced model, with everything that `pipeline_cut` reads; None where there is no reduced
            model, or its blocks are not those of the plan.
        facts: None likewise.
        findings: about the plan, in the names of the model itself.
    """

    resolved: ResolvedPlan | None
    facts: CutFacts | None
    findings: tuple[Diagnostic, ...]

    @property
    def ok(self) -> bool:
        return not any(d.is_error for d in self.findings) and self.facts is not None and self.facts.proven


@reduced_runs()
def staged_plan(
    plan: PlanFile, model: ModelLayouts, *, severity: Severity = Severity.ERROR, allow_unproven: bool = False
) -> StagedPlan:
    """Look at the stages of a plan without structural errors.

    Args:
        severity: the severity of findings about the cut.
        allow_unproven: report obstacles to making or calling the reduced model as warnings.
    """
    try:
        recorded_models = model.recorded_models
    except PlanError as error:
        asked = severity is Severity.ERROR
        return StagedPlan(None, None, tuple(unproven(d, allow_unproven) for d in error.diagnostics) if asked else ())
    resolved, _ = bind(plan, model.tree, model.sizes)
    parts = StageParts(resolved.pp_blocks, resolved.pp_first, resolved.pp_last, resolved.pp_carried)
    facts = cut_facts(recorded_models, parts)
    declared = frozenset((*resolved.pp_first, *resolved.pp_last))
    resolved = replace(
        resolved,
        pp_first=facts.parts.first,
        pp_last=facts.parts.last,
        pp_handed=facts.handed,
        pp_results=facts.results or 0,
        pp_written=facts.written,
    )
    findings = [*stage_findings(resolved, facts, severity, declared)]
    if facts.proven:
        findings += stage_finding(model, facts.parts, severity)
    return StagedPlan(resolved, facts, tuple(replace(d, modules=model.names_in_model(d.modules)) for d in findings))


def with_stages(
    resolved: ResolvedPlan, staged: StagedPlan, severity: Severity = Severity.ERROR
) -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    """A plan bound to a model, with the stages of all its parts as its reduced model shows them; and the parts whose
    stage is unknown because the reduced model has none like them."""
    if staged.facts is None or staged.resolved is None:  # nothing ran: a part that the plan does not name has no stage
        return resolved, _unknown(resolved, tuple(_outside(resolved)), severity) if severity is Severity.ERROR else ()
    if not staged.facts.proven:
        return resolved, ()
    tree, there = resolved.tree, staged.resolved.tree
    stage = {there.pattern(name): 0 for name in staged.facts.parts.first}
    stage |= {there.pattern(name): 1 for name in staged.facts.parts.last}
    ends: tuple[dict[str, None], dict[str, None]] = (dict.fromkeys(resolved.pp_first), dict.fromkeys(resolved.pp_last))
    unknown = []
    for name in _outside(resolved):
        root = stage_root(tree, name, resolved.pp_blocks)
        places = map(tree.pattern, (root, name, *ancestors(name)))
        at = next((stage[place] for place in places if place in stage), None)
        if at is None:
            unknown.append(name)
        else:
            ends[at][root] = None
    handed: dict[str, HandedOn] = {}
    for one in staged.facts.handed:
        known = handed.setdefault(there.pattern(one.module), one)
        positions = tuple(sorted({*known.positions, *one.positions}))
        handed[there.pattern(one.module)] = replace(one, positions=positions)
    written = {there.pattern(name) for name in staged.facts.written}
    first = outermost(ends[0])
    found = replace(
        resolved,
        pp_first=first,
        pp_last=outermost(ends[1]),
        pp_handed=tuple(
            replace(given, module=name)
            for name in resolved.pp_carried
            if (given := handed.get(tree.pattern(name))) is not None
        ),
        pp_results=staged.facts.results or 0,
        pp_written=tuple(name for name in first if tree.pattern(name) in written),
    )
    return found, _unknown(resolved, tuple(unknown), severity)


def _outside(resolved: ResolvedPlan) -> Iterator[str]:
    """The parameters that the plan puts in no stage."""
    named = (*resolved.pp_blocks, *resolved.pp_first, *resolved.pp_last)
    prefixes = tuple(full_name(one, "") for one in named)
    return (name for name in resolved.tree.parameters if not full_name(name, "").startswith(prefixes))


def _unknown(resolved: ResolvedPlan, names: tuple[str, ...], severity: Severity) -> tuple[Diagnostic, ...]:
    return (unread(names, field_label(resolved.pipeline_parallel, "layers"), severity),) if names else ()


# The errors of a pipeline cut, as diagnostics.
CROSSING = Code("SP431")
NOWHERE = Code("SP432")
ORDER = Code("SP433")
APART = Code("SP435")
UNNAMED = Code("SP434")

WITHOUT = "use a mesh with pp 1"


def stage_findings(
    resolved: ResolvedPlan, facts: CutFacts, severity: Severity, declared: frozenset[str]
) -> Iterator[Diagnostic]:
    """The findings, in the names of the model that ran.

    Args:
        resolved: the plan, bound to that model.
        declared: the names in the plan's `first` and `last`.
        severity: the severity of all findings.
    """
    section = resolved.pipeline_parallel
    assert section is not None

    def about(field: str) -> Label | None:
        return field_label(section, field)

    if facts.order is not None:
        yield _order(facts, facts.order, about("layers"), severity)
        return
    if facts.shared:
        yield Diagnostic(
            code=ORDER,
            severity=severity,
            message=f"{named(facts.shared)} is part of one block and runs inside another",
            primary=about("layers"),
            help=WITHOUT,
            modules=facts.shared,
        )
    yield from _parameters(facts, about("layers"), severity)
    if facts.results is None or facts.unnamed:
        blocks = facts.results is None
        what = "the blocks return" if blocks else f"{named(facts.unnamed)} returns"
        yield Diagnostic(
            code=UNNAMED,
            severity=severity,
            message=f"{what} values other than a tensor, or a tuple with the same number of tensors in each",
            primary=about("layers" if blocks else "carry"),
            help=WITHOUT if blocks else "name a module inside it that returns the tensor",
            modules=facts.parts.blocks if blocks else facts.unnamed,
        )
    yield from _crossings(facts, section, severity, declared)
    if facts.apart and not facts.crossings:
        yield Diagnostic(
            code=APART,
            severity=severity,
            message=f"{named(facts.apart)} does not read the first result of the block before it",
            primary=about("layers"),
            help="name the blocks that pass the hidden state on",
            modules=facts.apart,
        )


def _order(facts: CutFacts, order: tuple[int, ...], label: Label | None, severity: Severity) -> Diagnostic:
    blocks = facts.parts.blocks
    more = [i for i in range(len(blocks)) if order.count(i) > 1]
    never = [i for i in range(len(blocks)) if i not in order]
    if more:
        message = f"{blocks[more[0]]} runs {order.count(more[0])} times in one forward"
    elif never:
        message = f"{blocks[never[0]]} does not run"
    else:
        message = f"the blocks run in the order {', '.join(map(str, order))}"
    return Diagnostic(
        code=ORDER,
        severity=severity,
        message=f"{message}: pipeline stages need blocks that run once, in order",
        primary=label,
        help=WITHOUT,
        modules=blocks,
    )


def _parameters(facts: CutFacts, label: Label | None, severity: Severity) -> Iterator[Diagnostic]:
    ends = facts.ends
    if ends.unread:
        yield unread(ends.unread, label, severity)
    for names, what in (
        (ends.inside, "is read between pipeline stages, while a block runs or between two"),
        (ends.both, "is read before the blocks and after them, so by two pipeline stages"),
    ):
        if names:
            message = f"{named(names)} {what}"
            yield Diagnostic(
                code=NOWHERE, severity=severity, message=message, primary=label, help=WITHOUT, modules=names
            )


def unread(names: tuple[str, ...], label: Label | None, severity: Severity) -> Diagnostic:
    """The finding about parameters that no run reads."""
    return Diagnostic(
        code=NOWHERE,
        severity=severity,
        message=f"no run reads {named(names)}: its pipeline stage is not known",
        primary=label,
        help="name it in `first` or `last` of pipeline_parallel",
        modules=names,
    )


def _crossings(
    facts: CutFacts, section: PipelineParallel, severity: Severity, declared: frozenset[str]
) -> Iterator[Diagnostic]:
    """One finding for each set of modules from which the values come."""
    run = facts.run
    if run is None:
        return
    seen = set[tuple[str, ...]]()
    tree = run.tree
    for crossing in facts.crossings:
        sources = [run.returning.get(root) for root in crossing.roots]
        known = tuple(dict.fromkeys(tree.pattern(one) for one in sources if one is not None))
        maker = run.trace.producers.get(crossing.roots[0]) if crossing.roots else None
        key = known or ((tree.pattern(maker.module) if maker is not None else ""),)
        if key in seen:
            continue
        seen.add(key)
        misplaced = [name for one in sources if one is not None for name in (one, *ancestors(one)) if name in declared]
        if misplaced:
            field = "first" if misplaced[0] in facts.parts.first else "last"
            yield Diagnostic(
                code=CROSSING,
                severity=severity,
                message=_message(run, crossing),
                primary=field_label(section, field),
                notes=_notes(run, crossing),
                help=f"remove {misplaced[0]} from `{field}`: a run of the reduced model finds its stage",
            )
            continue
        carry = [*section.carry, *(one for one in known if one not in section.carry)]
        can = None not in sources and known and not set(known) <= set(section.carry)
        yield Diagnostic(
            code=CROSSING,
            severity=severity,
            message=_message(run, crossing),
            primary=field_label(section, "carry" if "carry" in section.given else "layers"),
            notes=_notes(run, crossing),
            help=f"add `carry: [{', '.join(carry)}]`"
            if can
            else "no module returns it by itself: use a mesh with pp 1",
        )


def _message(run: StageRun, crossing: Crossing) -> str:
    value = run.trace.values[crossing.value]
    what = f"a value {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    where = (
        f"the result `{crossing.result}`" if crossing.result else run.tree.pattern(crossing.read.module) or "the model"
    )
    return f"{where} needs {what} from an earlier pipeline stage, and that stage does not pass it on"


def _notes(run: StageRun, crossing: Crossing) -> tuple[str, ...]:
    made = [event for root in crossing.roots if (event := run.trace.producers.get(root)) is not None]
    lines = dict.fromkeys(f"made {_place(run, event)}" for event in made)
    parameters = [run.trace.parameters[root] for root in crossing.roots if root in run.trace.parameters]
    lines |= dict.fromkeys(f"the parameter {name}, of another stage" for name in parameters)
    read = f"read {_place(run, crossing.read)}" if not crossing.result else ""
    return tuple(line for line in (*lines, read) if line)


def _place(run: StageRun, event: Event) -> str:
    where = f" ({event.source.short}: {event.source.text})" if event.source is not None else ""
    return f"by {run.tree.pattern(event.module) or 'the model'}{where}"
