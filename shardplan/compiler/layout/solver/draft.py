"""Drafts of plans: rules by pattern, and what the layout check finds in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from shardplan.compiler.layout.finding import Finding
from shardplan.compiler.layout.layout_check import LayoutReport, Search, bound_to, check_layout
from shardplan.compiler.layout.layout_diagnostics import with_line
from shardplan.compiler.layout.repairs import Repair
from shardplan.compiler.layout.run import Proof, RecordedModel
from shardplan.core.by_key import by_key
from shardplan.core.mesh import MeshSizes
from shardplan.core.plan import PlanFile, ResolvedPlan, Rule, overlays_of, stated_options
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, full_name
from shardplan.language import parse_plan
from shardplan.styles.kept_options import KEPT

Options = Mapping[str, Any]  # `style` and a rule's options
Rules = Mapping[str, Options]

Entry = TypeVar("Entry")

FURTHER = "#"  # no module name contains it
PARTIAL: Options = {"style": "replicated_with_grad_allreduce"}
FIXABLE = ("partial", "complete", "meeting", "output")  # of gradients of whole values: the sharding fits


class Score(NamedTuple):
    """How far a draft runs before an error; larger is better.

    Attributes:
        fits: only gradients of whole values are wrong.
        further: the number of right operations before the first wrong one, and whether this one raises, as it has begun then.
        fewer: the negated number of errors.
    """

    fits: bool
    further: tuple[int, bool]
    fewer: int


NOWHERE = Score(False, (0, False), 0)


@dataclass(frozen=True, slots=True)
class Draft:
    """Rules that may become a plan.

    Args:
        tensor_parallel, sequence_parallel: pattern -> style and options.
        together: norms that gather the sequence for several parts of a block -> the rules of norm and parts if each part
            gathers it itself.
        sums: section -> pattern -> `sum_outputs`, and `optional`.
        distributed: section -> the rules of expert parallelism.
    """

    tensor_parallel: Rules
    sequence_parallel: Rules | None = None
    together: Mapping[str, Rules] = field(default_factory=dict)
    sums: Mapping[str, Rules] = field(default_factory=dict)
    distributed: Mapping[str, Rules] = field(default_factory=dict)

    def with_rules(self, rules: Rules) -> Draft:
        """The draft with more rules in `tensor_parallel`; for existing rules, the options are joined."""
        return replace(self, tensor_parallel=_joined(self.tensor_parallel, rules))

    def addressed(self, tree: ModuleTree) -> Draft:
        """The draft with the patterns that a plan file has for a tree's model."""

        def named(rules: Rules) -> Rules:
            return {tree.address(pattern): options for pattern, options in rules.items()}

        overlay = None if self.sequence_parallel is None else named(self.sequence_parallel)
        sums, distributed = (
            {on: named(rules) for on, rules in found.items()} for found in (self.sums, self.distributed)
        )
        return Draft(named(self.tensor_parallel), overlay, sums=sums, distributed=distributed)

    @property
    def sections(self) -> Mapping[str, Rules]:
        """The rules of each section, including those with `sum_outputs`."""
        overlay = _laid_over(self.sequence_parallel or {}, self.tensor_parallel)
        rules = {"tensor_parallel": self.tensor_parallel, "sequence_parallel": overlay, **self.distributed}
        return {section: _joined(found, self.sums.get(section, {})) for section, found in rules.items()}

    def document(self, name: str = "draft") -> dict[str, Any]:
        """The draft as the data of a plan file."""
        return {"version": "1", "name": name, **section_documents(self.sections)}

    def plan(self) -> PlanFile | None:
        """The draft as a plan; None where it is not well-formed."""
        parsed = parse_plan(self.document(), name="draft")
        return None if parsed.plan is None or any(d.is_error for d in parsed.diagnostics) else parsed.plan


def section_documents(sections: Mapping[str, Rules]) -> dict[str, Any]:
    """The sections as the data of a plan file."""
    document: dict[str, Any] = {}
    for section, rules in sections.items():
        if rules:
            outside, _, inside = section.rpartition(".")
            place = document[outside] if outside else document
            place[inside] = {p: _entry(found) for p, found in listed(rules).items()}
    return document


def _laid_over(rules: Rules, under: Rules) -> Rules:
    """The rules of an overlay, without options that equal those of the rules under them."""
    found: dict[str, Options] = {}
    for pattern, options in rules.items():
        below = under.get(pattern, {})
        if options != below:
            said = {name: value for name, value in options.items() if name not in KEPT or value != below.get(name)}
            found[pattern] = said | ({"shares": []} if "shares" in below and "shares" not in options else {})
    return found


def _joined(rules: Rules, more: Rules) -> Rules:
    joined = dict(rules)
    for pattern, options in more.items():
        joined[pattern] = {**joined.get(pattern, {}), **options}
    return dict(sorted(joined.items(), key=lambda item: is_alternative(item[0])))


def partial_gradients(pattern: str, module: ModuleInfo) -> Rules:
    """Rules for a module's parameters that are whole and whose gradients are partial sums."""
    return {full_name(pattern, parameter.name): PARTIAL for parameter in module.parameters}


def alternative(pattern: str) -> str:
    """Another pattern for the same modules. Its rule comes after that of the plain pattern, and replaces it for some of them."""
    around, _, last = pattern.rpartition(".")
    return f"{around}.{{{last}}}"


def further(pattern: str, number: int) -> str:
    """A key for one of several rules that replace a pattern's rule for some of its modules; in a plan they are a list."""
    return f"{pattern}{FURTHER}{number}"


def is_alternative(pattern: str) -> bool:
    """Whether a pattern is one that `alternative` or `further` returns."""
    return pattern.endswith("}") or FURTHER in pattern


def listed(rules: Mapping[str, Entry]) -> dict[str, list[Entry]]:
    """A plan's keys -> their rules."""
    return by_key((pattern.partition(FURTHER)[0], entry) for pattern, entry in rules.items())


def _entry(rules: Sequence[Options]) -> Any:
    """The value in a plan for the rules of one key."""
    if len(rules) > 1:
        return [dict(options) for options in rules]
    return rules[0]["style"] if rules[0].keys() == {"style"} else dict(rules[0])


class DraftTrials:
    """Tries drafts on a reduced model.

    Args:
        recorded_models: the reduced model with each kind of input.
        tp: the size of the axis.
        tree: the reduced model's. The patterns of drafts have no prefix.
        search: how many runs of drafts may be tried; None: as many as `init`. It has no bound on seconds, so that every machine finds the same plan.
    """

    def __init__(
        self,
        recorded_models: tuple[RecordedModel, ...],
        tp: int,
        tree: ModuleTree | None = None,
        search: Search | None = None,
    ):
        self.recorded_models, self.tp = recorded_models, tp
        self.tree = replace(recorded_models[0].tree, base_prefix="") if tree is None else tree
        self.search = search or Search(BOUNDS.drafts, inf)
        self._proofs: dict[str, Proof] = {}

    @property
    def rows(self) -> int:
        """The rows of the first tensor of the first kind of input, which are the batch's; 0 where no argument is a tensor."""
        tensors = (one for one in self.recorded_models[0].inputs.values() if isinstance(one, Tensor) and one.ndim)
        return next(map(len, tensors), 0)

    def bound(self, draft: Draft, *, overlay: bool = False) -> ResolvedPlan | None:
        """The draft bound to the reduced model; None where binding or the structural checks have an error."""
        plan = draft.plan()
        if plan is None:
            return None
        resolved, errors = bound_to(self.tree, plan, MeshSizes(tp=self.tp), overlays_of(overlay))
        return None if errors else resolved

    def proof(self, draft: Draft, *, overlay: bool = False) -> Proof | None:
        """The layout check of a run with the first kind of input; None also where nothing more may be tried."""
        key = repr((draft, overlay))
        if key not in self._proofs:
            resolved = self.bound(draft, overlay=overlay)
            if resolved is None or self.search.over:
                return None
            self._proofs[key] = self.search.attempt(resolved, self.recorded_models[0])
        return self._proofs[key]

    def hard(self, draft: Draft) -> Sequence[Finding]:
        """The findings of `proof` where the sharding does not fit, in the order of the run; none without a proof."""
        proof = self.proof(draft)
        return () if proof is None else [finding for finding in proof.findings if finding.kind not in FIXABLE]

    def score(self, draft: Draft) -> Score | None:
        """How far a draft runs; None without a proof."""
        if self.proof(draft) is None:
            return None
        hard = self.hard(draft)
        reached = ((finding.at, finding.kind == "crash" and bool(finding.operation)) for finding in hard)
        return Score(not hard, min(reached, default=(0, False)), -len(hard))

    def report(self, draft: Draft, *, overlay: bool = False, help: bool = False) -> LayoutReport | None:
        """The layout check over all kinds of inputs; None also where nothing more may be tried."""
        resolved = self.bound(draft, overlay=overlay)
        if resolved is None or self.search.over:
            return None
        self.search.tries -= len(self.recorded_models)
        search = Search(min(BOUNDS.repairs_of_plan, self.search.tries), self.search.seconds, of_draft=True)
        allowed = search.tries
        found = check_layout(resolved, self.recorded_models, help=help, search=search)
        self.search.tries -= allowed - search.tries
        self.search.seconds = search.seconds
        return found

    def right(self, draft: Draft) -> bool:
        """Whether a draft passes the layout check, with its overlay and without."""
        overlays = (False, True) if draft.sequence_parallel else (False,)
        reports = [self.report(draft, overlay=overlay) for overlay in overlays]
        return all(report is not None and report.ok for report in reports)

    def right_with_padding(self, draft: Draft) -> bool:
        """Whether a draft with an overlay passes where the first kind of input is padded: a mask may be made from the length of what a rank holds."""
        padded = self.recorded_models[0].with_padding
        if padded is None:
            return True
        resolved = self.bound(draft, overlay=True)
        return resolved is not None and not self.search.over and not self.search.attempt(resolved, padded).findings

    def reason(self, draft: Draft, *, overlay: bool = False) -> str:
        """The first error of a draft that is not right."""
        plan = draft.plan()
        assert plan is not None
        resolved, errors = bound_to(self.tree, plan, MeshSizes(tp=self.tp), overlays_of(overlay))
        if not errors and self.search.over:
            return f"the search ended after {BOUNDS.drafts} tries"
        found = errors or check_layout(resolved, self.recorded_models, help=False).diagnostics
        if not found:
            padded = self.recorded_models[0].with_padding
            assert padded is not None  # the draft is right without
            found = check_layout(resolved, (padded,), help=False).diagnostics
        return with_line(found[0])

    def fixed(self, draft: Draft, *, overlay: bool = False, rounds: int = BOUNDS.repair_rounds) -> Draft | None:
        """The draft with the changes that the layout check proposes; None where they do not suffice."""
        for _ in range(rounds):
            report = self.report(draft, overlay=overlay, help=True)
            if report is None:
                return None
            if report.ok:
                return draft
            changed = draft
            for repair in filter(None, report.repairs):  # what has no change yet may have one after the others
                for one in filter(None, (repair, repair.also)):
                    changed = self._changed(changed, one, overlay)
            if changed == draft:
                return None
            draft = changed
        return None

    def summed(self, draft: Draft) -> Draft | None:
        """The draft with the gradients of whole parameters summed where they are partial sums; None where it is still not
        right."""
        proof = self.proof(draft)
        found = () if proof is None else (f.subject for f in proof.findings if f.kind == "partial")
        owners = (self.tree.parameters[name][0].name for name in found if name in self.tree.parameters)
        more = draft.with_rules({self.tree.pattern(name): PARTIAL for name in owners})
        report = self.report(more)
        return more if report is not None and report.ok else None

    def _changed(self, draft: Draft, repair: Repair, overlay: bool) -> Draft:
        """The draft with a change, made for each pattern separately; a change for the overlay is made in the overlay."""
        section = "sequence_parallel" if overlay else repair.section
        rules = dict(getattr(draft, section) or {})
        literal = repair.pattern in repair.names
        for pattern in [repair.pattern] if literal else dict.fromkeys(self.tree.pattern(name) for name in repair.names):
            if repair.new is not None:
                rules[pattern] = options_of(repair.new)
            elif overlay and pattern in draft.tensor_parallel:
                rules[pattern] = {"style": "replicate"}
            else:
                rules.pop(pattern, None)
        return replace(draft, **{section: rules})


def divided(options: Options) -> list[str]:
    """The numbers that a draft's rule divides."""
    return [one for one in options.get("shares", ()) if isinstance(one, str)]


def sharing(options: Options, shares: Sequence[Any]) -> Options:
    """A draft's rule with further shares: names of numbers, and mappings."""
    return {**options, "shares": [*options.get("shares", ()), *shares]} if shares else options


def options_of(rule: Rule) -> Options:
    """A rule's style, and the options that it states."""
    return {"style": rule.style, **stated_options(rule)}
