"""Making a new plan file for a model."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardplan.authoring.context_section import NoSection, context_section
from shardplan.compiler.check.check_words import join
from shardplan.compiler.layout.solver.draft import PARTIAL, Rules, is_alternative
from shardplan.core.diagnostics import Code, Diagnostic, PlanError, Severity
from shardplan.core.plan import NO_OVERLAYS, Overlays, PlanFile
from shardplan.core.sources import SourceMap
from shardplan.core.tree import WITHOUT_FORWARD, ModuleTree, element
from shardplan.language.parsing import parse_text
from shardplan.language.plan_texts import value_text
from shardplan.model import FoundModel
from shardplan.styles.block_inputs import BLOCK_INPUT, RESULT
from shardplan.torchlib.modes import uncompiled

from .derive import EMBEDDING, HEAD, Derived, Whole, derive
from .write import WIDTH, Heading, joined, plan_document, plan_text

NOTHING = Code("SP530")
NO_OVERLAY = Code("SP531")
WHOLE = Code("SP532")
NO_EXPERTS_FOUND = Code("SP533")
GATHERED = Code("SP534")
REFUSED = Code("SP535")

SHOWN = "<init>"  # the plan's file name in findings, before it is written

VOCABULARY = (EMBEDDING["style"], HEAD["style"])


@dataclass(frozen=True, slots=True)
class NewPlan:
    """A plan that was found for a model.

    Args:
        text: the file, YAML.
        document: the plan as data.
        diagnostics: what stays whole (SP532), or is computed whole between split matrices (SP534); an error (SP531) where a sequence-parallel
            section was wanted but none was found, so that the plan has none.
        tries: the number of runs of drafts.
        sources: the texts that findings point into.
    """

    text: str
    document: Mapping[str, Any]
    diagnostics: tuple[Diagnostic, ...]
    tries: int
    sources: SourceMap = field(default_factory=SourceMap, repr=False)


def new_plan(
    found: FoundModel,
    *,
    tp: int = 2,
    sequence_parallel: bool = False,
    expert_parallel: bool = False,
    context_parallel: bool = False,
    name: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> NewPlan:
    """Find a plan, and write it as a plan file.

    Args:
        found: the model.
        tp: the tp size at which it is tried.
        sequence_parallel: find a sequence-parallel section.
        expert_parallel: find a section that distributes the experts.
        context_parallel: find rules for the axis cp; they need the sequence-parallel section.
        name: the plan's name; None is the model's type.
        progress: called with what is being done.

    Raises:
        PlanError: there is no reduced model, or it does not run (SP520 to SP523); nothing can be split (SP530); rules for the axis cp
            are wanted but none are found (SP531); the experts cannot be distributed (SP533).
    """
    with uncompiled():
        derived = derive(
            found, tp, sequence_parallel=sequence_parallel, expert_parallel=expert_parallel, progress=progress
        )
    if not derived.draft.tensor_parallel:
        reasons = tuple(f"{d.message}: {d.notes[0]}" for d in kept_whole(found, derived))
        raise PlanError((_error(NOTHING, f"nothing of {found.name} can be split at tp={tp}", *reasons),))
    lacking = () if derived.no_overlay is None else (no_overlay(found.name, derived.no_overlay),)
    if lacking and context_parallel:
        raise PlanError(lacking)
    if derived.no_experts is not None:
        message = f"no rules were found that distribute the experts of {found.name}"
        raise PlanError((_error(NO_EXPERTS_FOUND, message, f"on the reduced model: {derived.no_experts}"),))
    made = written(found, derived, name)
    if not context_parallel:
        return replace(made, diagnostics=(*made.diagnostics, *lacking))
    progress("splitting the sequence over cp")
    parsed = parse_text(made.text, file=SHOWN)
    assert parsed.plan is not None, made.text
    return written(found, derived, name, {"context_parallel": rules_over_cp(found, parsed.plan)})


def rules_over_cp(found: FoundModel, plan: PlanFile) -> Rules:
    """The rules for the axis cp that follow from a plan's sequence-parallel section.

    Raises:
        PlanError: there are none (SP531); there is no reduced model, or it does not run.
    """
    section = context_section(found, plan)
    if isinstance(section, NoSection):
        reasons = [f"on the reduced model: {d.message}" for d in section.findings[:1]]
        message = f"no rules for the axis cp were found for {found.name}: {section.reason}"
        raise PlanError((_error(NO_OVERLAY, message, *reasons),))
    return {key: rule if isinstance(rule, dict) else {"style": rule} for key, rule in section.items()}


def written(
    found: FoundModel, derived: Derived, name: str | None = None, more: Mapping[str, Rules] = MappingProxyType({})
) -> NewPlan:
    """The derived plan as a plan file.

    Args:
        more: other sections, by their names in plans.
    """
    kept = kept_whole(found, derived)
    model = found.tree.model_type or found.tree.class_names[0]
    notes = [f"{d.message}; {d.notes[0]}.{f' To split them: {d.help}.' if d.help else ''}" for d in kept]
    if derived.no_overlay is not None:
        notes.append(f"No sequence parallelism; on the reduced model: {derived.no_overlay}.")
    heading = Heading(
        name=name or model,
        description=_description(derived),
        models=(model,),
        notes=tuple(line for note in notes for line in textwrap.wrap(note, WIDTH)),
    )
    units = tuple(
        dict.fromkeys(
            found.tree.address(found.tree.pattern(u))
            for block in found.tree.modules
            if element(block)
            for u in _units(block, found.tree, derived)
        )
    )
    sections = {**derived.draft.addressed(derived.tree).sections, **more}
    return NewPlan(
        text=plan_text(heading, sections, derived.tree, units, derived.pipeline),
        document=plan_document(heading, sections, units, derived.pipeline),
        diagnostics=kept,
        tries=derived.tries,
    )


def refusing(made: NewPlan, names: Sequence[str]) -> NewPlan:
    """The plan that refuses calls with these arguments, and says so.

    Args:
        names: arguments of the model's forward.
    """
    about, _, rules = made.text.partition("\n\n")
    comment = "# With these the model also returns what each rank has of its own, such as the attention of its heads: such calls raise."
    text = f"{about}\n{comment}\nrefused_arguments: {value_text(names)}\n\n{rules}"
    said = Diagnostic(
        code=REFUSED,
        severity=Severity.WARNING,
        message=f"calls with {join(names, 'or')} are refused: the split model would return something else",
        help="to train with one of them, keep the modules whole whose results it returns, and remove it from `refused_arguments`",
    )
    document = {**made.document, "refused_arguments": list(names)}
    return replace(made, text=text, document=document, diagnostics=(*made.diagnostics, said))


def kept_whole(found: FoundModel, derived: Derived) -> tuple[Diagnostic, ...]:
    """Findings for the parts that stay whole on every rank, and for those that every rank computes in full."""
    whole = (_kept(found, one, WHOLE, "stay whole on every rank") for one in derived.whole)
    gathered = (_kept(found, one, GATHERED, "are split, but what is between them is not") for one in derived.gathered)
    return (*whole, *gathered)


def refused_overlays(model: str, findings: Mapping[Overlays, Sequence[Diagnostic]]) -> tuple[Diagnostic, ...]:
    """SP531 or SP533, where the proof refuses the plan that was found but accepts it without the overlay.

    Args:
        model: its name.
        findings: the findings for each variant of the plan.
    """
    wrong = {on: next((d.message for d in found if d.is_error), None) for on, found in findings.items()}
    refused = [on for on, message in wrong.items() if message is not None]
    if wrong[NO_OVERLAYS] is not None or not refused:
        return ()
    reason = str(wrong[refused[0]])
    if all("expert_parallel" in on for on in refused):
        message = f"no rules were found that distribute the experts of {model}"
        return (_error(NO_EXPERTS_FOUND, message, f"on the reduced model: {reason}"),)
    return (no_overlay(model, reason),)


def no_overlay(model: str, reason: str) -> Diagnostic:
    """The finding SP531 for sequence parallelism.

    Args:
        model: its name.
    """
    return _error(NO_OVERLAY, f"no sequence-parallel overlay was found for {model}", f"on the reduced model: {reason}")


def _units(name: str, tree: ModuleTree, derived: Derived) -> Iterator[str]:
    """A block with rules. FSDP2 gathers a unit's parameters for its own forward; where other code reads some of them, parts of the block."""
    if not _has_rules(tree.pattern(name), derived):
        return
    if tree.pattern(name) not in derived.read_outside:
        yield name
    elif tree.modules[name].class_name in WITHOUT_FORWARD:
        for child in tree.children[name]:
            yield from _units(child, tree, derived)


def _has_rules(unit: str, derived: Derived) -> bool:
    draft = derived.draft
    rules = (draft.tensor_parallel, draft.distributed.get("expert_parallel", {}))
    return any(rule == unit or rule.startswith(f"{unit}.") for section in rules for rule in section)


def _description(derived: Derived) -> str:
    """The plan's description: which parts of the blocks are split."""
    rules = [
        p
        for p, options in derived.draft.tensor_parallel.items()
        if options["style"] not in (BLOCK_INPUT, RESULT, PARTIAL["style"], "replicate") and not is_alternative(p)
    ]
    parts = dict.fromkeys(_part(rule.split("*.", 1)[1]) for rule in rules if "*." in rule)
    outside = [rule for rule in rules if "*" not in rule]
    vocabulary = [rule for rule in outside if derived.draft.tensor_parallel[rule]["style"] in VOCABULARY]
    alone = [rule for rule in outside if rule not in vocabulary]
    words = [f"{join(parts, 'and')} of each layer"] if parts else []
    words += [join(alone, "and")] if alone else []
    words += [f"{join(vocabulary, 'and')} over the vocabulary"] if vocabulary else []
    distributed = ", and distributes the experts over ep ranks" if derived.draft.distributed else ""
    return f"Splits {', and '.join(words)}{distributed}."


def _part(pattern: str) -> str:
    """The part of a block to which a pattern, relative to the block, belongs; in a list of parts, the element (T5's `layer.*.SelfAttention`)."""
    first, *others = pattern.split(".")
    if first.isdigit() and others:
        return others[0]
    return others[1] if len(others) > 1 and others[0] == "*" else first


def _kept(found: FoundModel, whole: Whole, code: Code, words: str) -> Diagnostic:
    patterns, sizes = whole.patterns, {name: p.numel for name, (_, p) in found.tree.parameters.items()}
    size = sum(sizes[name] for name in found.tree.under(patterns))
    listed = ", ".join(joined({found.tree.address(pattern): {"style": "replicate"} for pattern in patterns}))
    return Diagnostic(
        code=code,
        severity=Severity.WARNING,
        message=f"{listed} {words} ({size / sum(sizes.values()):.1%} of all parameters)",
        notes=(f"on the reduced model: {whole.forbidden.reason}",),
        help=whole.forbidden.change,
    )


def _error(code: Code, message: str, *notes: str) -> Diagnostic:
    return Diagnostic(code=code, severity=Severity.ERROR, message=message, notes=notes)
