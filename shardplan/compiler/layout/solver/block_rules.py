"""The rules that `init` would write for a block, as changes of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain

from shardplan.compiler.layout.finding import Finding
from shardplan.compiler.layout.layout_check import Search
from shardplan.compiler.layout.repairs import OURS, Repair, change, suspects, together
from shardplan.compiler.layout.run import RecordedModel
from shardplan.core.layout import P
from shardplan.core.plan import ResolvedPlan, Rule, Section, stated_options
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleTree, parent
from shardplan.styles import STYLES
from shardplan.styles.kept_options import KEPT

from .draft import DraftTrials
from .flow import Flow
from .regions import Group, grouped, regions
from .solve import Solver

# Slices do not fit the code, or a module's rule: what moves gradients alone is another matter.
KINDS = ("crash", "slices", "untyped", "arrival", "result")
Rules = Mapping[str, Rule]


class BlockRules:
    """The rules of a model's blocks. Each group of matrices is solved when a finding first asks for it, and once for all plans.

    Args:
        recorded_models: the reduced model with each kind of input.
        tp: the size of the axis.
        tree: the tree of the model itself.
    """

    def __init__(self, recorded_models: tuple[RecordedModel, ...], tp: int, tree: ModuleTree):
        search = Search(BOUNDS.help_drafts, BOUNDS.help_seconds)
        self.trials = DraftTrials(recorded_models, tp, search=search)
        self.full = tree
        self._solved = cache(self._solve)

    @cached_property
    def _groups(self) -> Mapping[Group, Solver]:
        """The groups, with those of parts that no gradient reaches (a model that another one trained)."""
        run, found = self.trials.recorded_models[0].reference, dict[Group, Solver]()
        trained = run.as_trained()
        for one in (run,) if trained is run else (run, trained):
            solver = Solver(self.trials, Flow(one, self.trials.tree), self.full)
            known = {row for group in found for row in group.rows}
            groups = grouped(regions(solver.flow), solver.flow)
            found |= {group: solver for group in groups if known.isdisjoint(group.rows)}
        return found

    def _solve(self, group: Group) -> Rules:
        """The rules by module or parameter; where nothing splits the group, those with which its code runs furthest. Empty where the
        search is over."""
        solved = self._groups[group].solve(group)
        draft = solved.against or solved.draft
        bound = self.trials.bound(draft) if draft is not None else None
        return {} if bound is None else {name: a.rule for name, a in bound.assignments.items()}

    def repairs(self, plan: ResolvedPlan, finding: Finding) -> Iterator[Repair]:
        """Changes to try: each difference between a plan's rules and those of the matrices around a finding, then all of them."""
        if finding.kind not in KINDS:
            return
        names, every = suspects(plan, finding), list[list[Repair]]()
        for group in self._groups:
            if self._concerns(group, names):
                every.append(list(_differences(plan, self._solved(group), names)))
                yield from every[-1]
                yield from _at_once(every[-1])
        if sum(map(bool, every)) > 1:  # parts of a block whose results are added up
            yield from _at_once(chain.from_iterable(every))

    def _concerns(self, group: Group, names: Iterable[str]) -> bool:
        """Whether matrices of a group, or the module of one, are among names."""
        pattern = self.trials.tree.pattern
        near = {pattern(name) for name in names}
        return any(one in near or parent(one) in near for one in (*group.columns, *group.rows))


def _at_once(changes: Iterable[Repair]) -> Iterator[Repair]:
    """Several changes as one, first what replaces a rule. Rules that are alike for siblings are found one by one, so that each has its
    finding."""
    if found := sorted(changes, key=lambda one: one.old is None):
        whole = together(found)
        yield from (whole,) if whole.also is not None else ()


def _differences(plan: ResolvedPlan, rules: Rules, names: Sequence[str]) -> Iterator[Repair]:
    """A change for each rule that a plan has otherwise, those of the given names first."""
    place = {name: i for i, name in enumerate(names)}
    seen: set[str] = set()
    for name in sorted(rules, key=lambda one: place.get(one, len(place))):
        pattern = plan.tree.pattern(name)
        new = None if pattern in seen else _changed(plan, name, rules[name])
        seen.add(pattern)
        if new is not None:
            assignment = plan.assignments.get(name)
            section: Section = assignment.section if assignment is not None else "tensor_parallel"
            if STYLES[new.style].along_sequence:
                section = "sequence_parallel"
            yield change(plan, name, assignment.rule if assignment is not None else None, new, section)


def _changed(plan: ResolvedPlan, name: str, rule: Rule) -> Rule | None:
    """The rule that a plan should have; None where its own says the same. A module that stays whole keeps its style, which says
    where a gradient is summed, and has the solver's shares."""
    old = plan.assignments[name].rule if name in plan.assignments else None
    sliced = f"{rule.style}_seq"
    sums = plan.sequence_parallel and STYLES[rule.style].output_source == P
    style = sliced if sums and sliced in STYLES else rule.style
    if old is not None and style == "replicate" and not STYLES[old.style].shards_parameters:
        new = replace(old, shares=rule.shares, location=OURS)
    elif old is not None and style == old.style:
        new = replace(old, location=OURS, **{option: getattr(rule, option) for option in KEPT})
    else:
        new = replace(rule, pattern="", style=style, location=OURS)
    same = old is not None and (old.style, stated_options(old)) == (new.style, stated_options(new))
    return None if same else new
