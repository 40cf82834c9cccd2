"""Changes of one rule that may fix a finding, the likeliest first. Each is tried before it is proposed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from shardplan.core.diagnostics import Edit, Location
from shardplan.core.folded_names import braced, folded
from shardplan.core.layout import P
from shardplan.core.plan import Assignment, Output, ResolvedPlan, Rule, Section, section_at, stated_options
from shardplan.core.tree import ancestors, block, full_name
from shardplan.language.globs import parse_glob
from shardplan.language.plan_texts import value_text
from shardplan.styles import STYLES, Style
from shardplan.styles.block_inputs import BLOCK_INPUT, RESULT
from shardplan.styles.kept_options import KEPT, with_kept
from shardplan.styles.style_record import REMOVAL, TrialKind

from .finding import Finding

OURS = Location("<help>")
Choice = tuple[Style | None, Output | None]  # a style, and its `output:`
REMOVE: Choice = (None, None)


@dataclass(frozen=True, slots=True)
class Repair:
    """A change of one rule.

    Args:
        pattern: the rule's pattern.
        names: the modules or parameters of this model that it matches.
        old: the rule that applies to them now.
        new: the rule that should apply; None: no rule.
        section: the section for the new rule.
        also: a change of another rule that belongs to it.
    """

    pattern: str
    names: tuple[str, ...]
    old: Rule | None
    new: Rule | None
    section: Section
    also: Repair | None = None

    def apply(self, plan: ResolvedPlan) -> ResolvedPlan:
        """The plan with the change."""
        changed = {name: a for name, a in plan.assignments.items() if name not in self.names}
        if self.new is not None:
            for name in self.names:
                changed[name] = Assignment(name, name in plan.tree.parameters, self.new, self.section)
        order = (*plan.tree.modules, *plan.tree.parameters)
        result = replace(plan, assignments={name: changed[name] for name in order if name in changed}, incoming=None)
        return result if self.also is None else self.also.apply(result)

    @property
    def entry(self) -> str:
        """The rule as a line of a plan."""
        assert self.new is not None
        return f"{self.pattern}: {written(self.new)}"

    @property
    def help(self) -> str:
        """The instruction; and its cost, where it gives up a split."""
        return f"{', and '.join(one.placed._instruction for one in self.changes)}{self.given_up}"

    @property
    def changes(self) -> tuple[Repair, ...]:
        """The change of each rule."""
        return (self, *(self.also.changes if self.also is not None else ()))

    @property
    def placed(self) -> Repair:
        """The change, made to the rule that states the options: an overlay's rule keeps options of the rule under it."""
        old, new = self.old, self.new
        if old is None or new is None or old.under is None or new.style != old.style:
            return self
        changed = {name: value for name, value in new.options.items() if value != old.options[name]}
        if not changed or not changed.keys() <= {*KEPT} - old.stated:
            return self
        section = section_at(old.under.location.path) or self.section
        return replace(self, old=old.under, new=replace(old.under, location=OURS, **changed), section=section)

    @property
    def given_up(self) -> str:
        """The split that would be given up."""
        if self.old is None:
            return ""
        before, after = STYLES[self.old.style], STYLES[self.new.style] if self.new is not None else None
        if before.shards_parameters and (after is None or not after.shards_parameters):
            return f"; this leaves {self.pattern} whole on every rank"
        in_layers = "*" in self.pattern  # logits are read by a loss alone
        if in_layers and before.output_destination is None and after is not None and after.gathers_features:
            return f"; this leaves what reads {self.pattern} whole on every rank"
        return ""

    @property
    def _instruction(self) -> str:
        where = f" under {self.section}" if self.section == "sequence_parallel" else ""
        if self.new is None:
            assert self.old is not None  # else nothing would change
            return f"remove the rule `{self.pattern}: {written(self.old)}`"
        if self.old is None:
            return f"add `{self.entry}`{where}"
        return f"write `{self.entry}`{where} instead of `{written(self.old)}`"


def combined(one: Repair, other: Repair) -> Repair | None:
    """Both changes as one rule, if they declare the same for names that differ in one place; else None."""
    if (one.section, one.old, one.new, one.also) != (other.section, other.old, other.new, other.also):
        return None
    texts = (text for pattern in (one.pattern, other.pattern) for text in parse_glob(pattern).texts)
    patterns = list(folded(texts, lambda row, at: True, braced))
    return replace(one, pattern=patterns[0], names=(*one.names, *other.names)) if len(patterns) == 1 else None


def together(changes: Iterable[Repair]) -> Repair:
    """Changes as one; those that are alike for siblings are one rule."""
    rules: list[Repair] = []
    for one in changes:
        both = combined(rules[-1], one) if rules else None
        rules[-1:] = [both] if both is not None else [*rules[-1:], one]
    return reduce(lambda rest, one: replace(one, also=rest), reversed(rules))


def written(rule: Rule) -> str:
    """A rule's style and options as a plan writes them."""
    options = stated_options(rule)
    return value_text({"style": rule.style, **options}) if options else rule.style


def suspects(plan: ResolvedPlan, finding: Finding) -> tuple[str, ...]:
    """The modules and parameters whose rule may be wrong, the likeliest first."""
    tree = plan.tree
    found: dict[str, None] = {}
    if finding.subject in tree.parameters:
        owner = tree.owner(finding.subject)
        whole = finding.subject in plan.assignments or tree.modules[owner].kind == "other"
        found[finding.subject if whole else owner] = None
        found[owner] = None
    elif finding.subject in tree.modules:
        found[finding.subject] = None
    for origin in origins(finding):
        found[origin] = None
        found.update(dict.fromkeys(_single_parameters(plan, origin)))
    found.update(dict.fromkeys(_single_parameters(plan, finding.module)))
    around = [finding.module, *ancestors(finding.module)]
    limit = block(finding.module)
    for name in around[: around.index(limit) + 1] if limit in around else around[:1]:
        found[name] = None
        for child in tree.children[name]:
            if child in plan.assignments and tree.modules[child].kind != "norm":
                found[child] = None
    return tuple(name for name in found if name in tree.parameters or (name and tree.modules[name].kind != "list"))


def _single_parameters(plan: ResolvedPlan, name: str) -> Iterator[str]:
    """The parameters of a module that rules name one by one, or could."""
    module = plan.tree.modules[name]
    single = any(full_name(name, p.name) in plan.assignments for p in module.parameters)
    own = (p for p in module.parameters if p.adapter is None)
    return (full_name(name, p.name) for p in own if single or (module.kind == "other" and len(p.shape) > 1))


def origins(finding: Finding) -> Iterable[str]:
    """The modules that the operands of a finding come from, the nearest of each operand first."""
    rows = zip_longest(*(operand.from_modules for operand in finding.operands))
    return dict.fromkeys(name for row in rows for name in row if name is not None)


def repairs(plan: ResolvedPlan, finding: Finding) -> Iterator[Repair]:
    """Changes to try: first the likeliest of each suspect, then the others."""
    lists = [list(_of(plan, name)) for name in suspects(plan, finding)]
    seen: set[tuple[str, str]] = set()
    for width, start in ((3, 0), (12, 3)):
        for changes in lists:
            for repair in changes[start : start + width]:
                key = (repair.pattern, written(repair.new) if repair.new else "")
                if key not in seen:
                    seen.add(key)
                    yield repair


def moved_inputs(plan: ResolvedPlan, finding: Finding) -> Iterator[Repair]:
    """Changes to try if a block input moves a value to R that a residual reads too: the norms at the block's beginning make the move instead."""
    if finding.kind not in ("partial", "meeting"):
        return
    tree = plan.tree
    for name in (finding.module, *ancestors(finding.module)):
        assignment = plan.assignments.get(name)
        norms = [child for child in tree.children[name] if tree.modules[child].kind == "norm"]
        if assignment is None or assignment.rule.style != BLOCK_INPUT or not norms:
            continue
        old = assignment.rule
        kept = with_kept(Rule("", "replicate", OURS), old)
        whole = change(plan, name, old, kept if stated_options(kept) else None, assignment.section)
        for chosen in (norms, *([norm] for norm in norms)) if len(norms) > 1 else (norms,):
            repair = None
            for norm in reversed(chosen):
                there = plan.assignments.get(norm)
                rule = there.rule if there is not None else None
                section: Section = there.section if there is not None else "tensor_parallel"
                repair = replace(change(plan, norm, rule, Rule("", RESULT, OURS), section), also=repair)
            yield replace(whole, also=repair)


def reads_outside(style: Style) -> bool:
    """Whether a style of a whole module may say that a result is read outside of its block."""
    return style.read_outside_option and style.shards_parameters is False and style.weight.computed == "R"


def choices(kind: TrialKind, *, overlaid: bool) -> tuple[Choice, ...]:
    """The styles to try for a kind of module, the likeliest first, as the styles' records say."""
    ranked: list[tuple[int, Choice]] = [
        (rank, (style, trial.output))
        for style in STYLES.values()
        for trial in style.trials
        if kind in trial.on and (rank := trial.sliced if overlaid else trial.whole) is not None
    ]
    return tuple(choice for _, choice in sorted([*ranked, (REMOVAL, REMOVE)] if ranked else [], key=itemgetter(0)))


def _of(plan: ResolvedPlan, name: str) -> Iterator[Repair]:
    tree = plan.tree
    parameter = name in tree.parameters
    kind = "parameter" if parameter else tree.modules[name].kind
    assignment = plan.assignments.get(name)
    old = assignment.rule if assignment else None
    if assignment is not None:
        yield from _with_other_options(plan, name, assignment.rule, assignment.section)
    for style, output in choices(kind, overlaid=plan.sequence_parallel):
        if style is None:
            if assignment is not None:
                yield change(plan, name, assignment.rule, None, assignment.section)
            continue
        if old is not None and style.name == old.style and output == old.output:
            continue
        overlaid = style.along_sequence or output in ("gather", "reduce_scatter")
        overlaid = overlaid or (assignment is not None and assignment.section == "sequence_parallel")
        section: Section = "sequence_parallel" if overlaid else "tensor_parallel"
        yield change(plan, name, old, ruled(style, old, output), section)


def ruled(style: Style, old: Rule | None, output: Output | None) -> Rule:
    """A rule of another style, with those options of the old rule that this style accepts."""
    rule = Rule(pattern="", style=style.name, location=OURS, output=output)
    if old is None:
        return rule
    return replace(
        with_kept(rule, old),
        argument=old.argument if style.argument_option else None,
        arguments=old.arguments if style.argument_option else (),
        read_outside=old.read_outside if style.read_outside_option else (),
    )


def _with_other_options(plan: ResolvedPlan, name: str, old: Rule, section: Section) -> Iterator[Repair]:
    """The same style with one option changed."""
    style = STYLES[old.style]
    outputs = (*style.options.output, None) if style.options.output else ()
    options: list[dict[str, Any]] = [{"output": one, "grad": None} for one in outputs if one != old.output]
    if old.grad is not None or (style.options.grad and style.is_block_input):
        options += [{"grad": "complete" if old.grad is None else None}]
    if reads_outside(style) and not old.read_outside:
        options += [{"read_outside": (position,)} for position in (0, 1)]
    return (change(plan, name, old, replace(old, location=OURS, **one), section) for one in options)


def change(plan: ResolvedPlan, name: str, old: Rule | None, new: Rule | None, section: Section) -> Repair:
    """A rule's change for a module or parameter and its counterparts in other layers."""
    tree = plan.tree
    single = (
        new is not None and P in STYLES[new.style].input_sources
    )  # one block's entry into the sequence-parallel region
    pattern = name if single else tree.pattern(name)
    among = tree.parameters if name in tree.parameters else tree.modules
    names = tuple(other for other in among if (other if single else tree.pattern(other)) == pattern)
    return Repair(pattern, names, old, new, section)


# Tried changes, as edits of a plan's text.
def edits_of(plan: ResolvedPlan, repair: Repair | None) -> tuple[Edit, ...]:
    """The edits of a plan that have the effect of a change to its bound rules; empty where no edit of one rule has it.

    Args:
        plan: the plan, bound to the reduced model, as the change is.
    """
    made = [_edit_of(plan, one.placed) for one in (repair.changes if repair is not None else ())]
    edits = tuple(edit for edit in made if edit is not None)
    return edits if len(edits) == len(made) else ()


def _edit_of(plan: ResolvedPlan, repair: Repair) -> Edit | None:
    old, new = repair.old, repair.new
    value = written(new) if new is not None else None
    if old is None or old.location == OURS or section_at(old.location.path) != repair.section:
        return None if value is None else Edit(repair.section, repair.pattern, value)
    kept = _kept(plan, old, set(repair.names))
    if kept is None and value is None:
        return None
    return Edit(
        repair.section,
        repair.pattern,
        _with_flags(value, old),
        Location(old.location.file, old.location.path),
        kept or (),
        override=kept is None or old.override,
    )


def _with_flags(value: str | None, old: Rule) -> str | None:
    """The text of the new rule; it may match nothing if the old rule may."""
    if value is None or not old.optional:
        return value
    inner = value[1:-1] if value.startswith("{") else f"style: {value}"
    return f"{{{inner}, optional: true}}"


def _kept(plan: ResolvedPlan, old: Rule, changed: set[str]) -> tuple[str, ...] | None:
    """The alternatives of a rule's pattern that reach only unchanged names; None if one reaches changed and unchanged names."""
    reached = [*_reached(plan, old)]
    if any(names & changed and names - changed for _, names in reached):
        return None
    return tuple(text for text, names in reached if not names & changed)


def _reached(plan: ResolvedPlan, rule: Rule) -> Iterator[tuple[str, set[str]]]:
    """Each alternative of a rule's pattern, with the matching names to which the rule applies."""
    acting = ((name, one) for name, a in plan.assignments.items() for one in (a.rule, a.rule.under) if one is not None)
    own = [name for name, one in acting if one.location == rule.location]
    for text in parse_glob(rule.pattern).texts:
        one = parse_glob(text)
        yield text, {name for name in own if one.matches(plan.tree.address(name))}
