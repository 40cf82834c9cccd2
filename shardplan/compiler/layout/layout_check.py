"""The layout check of a bound plan: one finding for each mistake, and the change that fixes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from shardplan.compiler.bind import bind
from shardplan.compiler.check import check as check_structure
from shardplan.core.by_key import by_key
from shardplan.core.diagnostics import Diagnostic, Location
from shardplan.core.layout import Layout
from shardplan.core.mesh import Axis, MeshSizes
from shardplan.core.module_program import Draws
from shardplan.core.plan import Assignment, Overlays, PlanFile, ResolvedPlan
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.sum_outputs import SummedOutputs
from shardplan.core.tree import ModuleTree, ancestors, block, element, full_name
from shardplan.styles.boundary import returns_tokens

from .code_advice import advice
from .cross_module_reads import joined_reads, read_in_any
from .drawing_operands import DrawingOperand
from .finding import Finding
from .layout_diagnostics import diagnostic
from .mergeable_sums import SharedSum
from .outside_reads import outside_repairs
from .reads import SharedRead, agreed
from .repairs import OURS, Repair, combined, edits_of, moved_inputs, repairs
from .run import Proof, RecordedModel, prove
from .unsummed import holding, undeclared


@dataclass(slots=True)
class Search:
    """How much the search for changes may still do for one plan, over all its variants and kinds of input. Once it is
    used up, findings are reported without a change.

    Args:
        tries: how many changes may still be tried. This is the limit that plans meet, the same on every machine.
        seconds: the processor time left for them; an outer limit, for slow models.
        of_draft: whether only a right plan is of use. The search then ends at the first finding that no change fixes.
        solved: the changes that the solver has for a finding of a plan (`BlockRules.repairs`).
        stuck: whether it ended so.
    """

    tries: int = BOUNDS.repairs_of_plan
    seconds: float = field(default_factory=lambda: BOUNDS.repair_seconds)
    of_draft: bool = False
    solved: Callable[[ResolvedPlan, Finding], Iterator[Repair]] = field(
        default=lambda plan, finding: iter(()), compare=False
    )
    stuck: bool = field(default=False, init=False)

    @property
    def over(self) -> bool:
        return self.tries <= 0 or self.seconds <= 0 or self.stuck

    def attempt(
        self, plan: ResolvedPlan, recorded: RecordedModel, stop: Callable[[Finding], bool] = lambda finding: False
    ) -> Proof:
        """Prove a plan, up to a finding that shows it to be useless."""
        start = time.process_time()
        proof = prove(plan, recorded, stop)
        self.tries -= 1
        self.seconds -= time.process_time() - start
        return proof


Key = tuple[str, ...]
Groups = dict[Key, list[Finding]]


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """The result of a layout check.

    Args:
        diagnostics: one for each mistake.
        secondary: the findings that follow from these mistakes.
        incoming: `ResolvedPlan.incoming`, for the lowering.
        cross_module_reads: `ResolvedPlan.cross_module_reads`, for the lowering.
        reads: values that several modules each move I -> R, where one block input would do.
        lengths: for a model without configuration: length of a dim that its code splits -> where. tp must divide each.
        sums: partial sums that are reduced one by one and then added to each other.
        repairs: for each of `diagnostics` the change that fixes it, where one was found.
        shared_reads: `ResolvedPlan.shared_reads`, for counting.
        same_arguments: `ResolvedPlan.same_arguments`, for counting.
        read_results: `ResolvedPlan.read_results`, for the lowering.
        through: (declared sum, dropout that its values pass on the way).
        operands: how the operand of each operation that may draw random numbers is spread, over all runs.
        draws: `ResolvedPlan.draws`, for the lowering.
        summed: the places of those `sum_outputs` that held in every run of their blocks.
        on_cp: the report of the rules for the axis cp, where these apply; its findings are here too.
    """

    diagnostics: tuple[Diagnostic, ...] = ()
    secondary: tuple[Diagnostic, ...] = ()
    incoming: Mapping[str, Layout] = field(default_factory=dict)
    cross_module_reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repairs: tuple[Repair | None, ...] = ()
    reads: tuple[SharedRead, ...] = ()
    sums: tuple[SharedSum, ...] = ()
    shared_reads: Mapping[str, str] = field(default_factory=dict)
    same_arguments: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    read_results: Mapping[str, frozenset[int]] = field(default_factory=dict)
    through: tuple[tuple[SummedOutputs, str], ...] = ()
    summed: frozenset[Location] = frozenset()
    lengths: Mapping[int, str] = field(default_factory=dict)
    operands: frozenset[DrawingOperand] = frozenset()
    draws: Mapping[str, Draws] = field(default_factory=dict)
    on_cp: LayoutReport | None = None

    @property
    def ok(self) -> bool:
        return not self.diagnostics

    def onto(self, resolved: ResolvedPlan) -> ResolvedPlan:
        """The plan with the results that the lowering needs; optional sums that were not seen to hold are left out."""
        sums = tuple(one for one in resolved.sums if not one.rule.optional or one.rule.location in self.summed)
        return replace(
            resolved,
            incoming=self.incoming,
            cross_module_reads=self.cross_module_reads,
            shared_reads=self.shared_reads,
            same_arguments=self.same_arguments,
            read_results=self.read_results,
            sums=sums,
            draws=self.draws,
        )


def check_layout(
    resolved: ResolvedPlan,
    recorded_models: Sequence[RecordedModel],
    *,
    help: bool = True,
    search: Search | None = None,
) -> LayoutReport:
    """Prove that every activation and every gradient of a plan has the layout that its readers assume.

    Args:
        resolved: the plan, bound to the reduced model's tree, with a tp size and without structural errors.
        recorded_models: the reduced model with its unsharded runs, one for each kind of input; they serve many plans.
        help: look for the changes that fix the findings; each costs a run.
        search: the limit of that search; None: as much as for a plan of its own.
    """
    if resolved.sizes.tp is None:
        raise ValueError("the layout check needs a tp size")
    if resolved.axis is Axis.CP and returns_tokens(
        resolved
    ):  # labels are cut before the model is called, so it must not shift them
        recorded_models = [recorded.unlabelled for recorded in recorded_models]
    if resolved.sizes.tp == 1:
        return LayoutReport()
    search = (search or Search()) if help else Search(tries=0)
    diagnostics: list[Diagnostic] = []
    secondary: list[Diagnostic] = []
    changes: list[Repair | None] = []
    proofs = []
    for recorded in recorded_models:
        proof = prove(resolved, recorded)
        proofs.append(proof)
        first, fixed, following = _explain(resolved, recorded, proof, search, help)
        for one, change in zip(first, fixed, strict=True):
            if one not in diagnostics:
                diagnostics.append(replace(one, edits=edits_of(resolved, change)))
                changes.append(change)
        secondary += [one for one in following if one not in secondary]
        if not proof.findings:
            unsummed = [one for one in undeclared(proof.declared) if one not in diagnostics]
            diagnostics += unsummed
            changes += [None] * len(unsummed)
    declared = [seen for proof in proofs for seen in proof.declared]
    return LayoutReport(
        diagnostics=tuple(diagnostics),
        secondary=tuple(secondary),
        incoming={name: layout for proof in reversed(proofs) for name, layout in proof.incoming.items()},
        cross_module_reads=joined_reads(recorded.cross_module_reads for recorded in recorded_models),
        repairs=tuple(changes),
        reads=tuple(one for one in proofs[-1].reads if all(one in proof.reads for proof in proofs)),
        sums=tuple(one for one in proofs[-1].sums if all(one in proof.sums for proof in proofs)),
        shared_reads=agreed(proof.shared_reads for proof in proofs),
        same_arguments=recorded_models[0].same_arguments,
        read_results=read_in_any(recorded.read_results for recorded in recorded_models),
        through=tuple(dict.fromkeys((seen.sum, name) for seen in declared for name in seen.through)),
        summed=holding(declared),
        operands=frozenset(operand for proof in proofs for operand in proof.operands),
    )


def bound_to(
    tree: ModuleTree, plan: PlanFile, sizes: MeshSizes, overlays: Overlays
) -> tuple[ResolvedPlan, tuple[Diagnostic, ...]]:
    """A plan bound to the tree of a reduced model, and its errors there: those of binding, and the structural ones."""
    resolved, about = bind(plan, tree, sizes, overlays)
    return resolved, tuple(d for d in (*about, *check_structure(resolved, seq_len=None)) if d.is_error)


def _explain(
    resolved: ResolvedPlan, recorded: RecordedModel, proof: Proof, search: Search, help: bool
) -> tuple[list[Diagnostic], list[Repair | None], list[Diagnostic]]:
    """The findings as diagnostics: one for each mistake, the change that fixes each, and what follows from them."""
    groups = grouped(proof.findings, resolved.tree)
    primary: list[Diagnostic] = []
    secondary: list[Diagnostic] = []
    changes: list[Repair | None] = []
    reported: set[Key] = set()
    plan = resolved
    while groups:
        key, group = next(iter(groups.items()))
        repair, left = _fix(plan, recorded, groups, search)
        found = diagnostic(plan, group, repair, _blamed(plan, group[0], repair))
        if repair is None and help:
            found = replace(found, help=advice(plan, group[0]))
        taken = revised(changes, repair)
        if taken is not None:
            at, again = taken
            changes[at], primary[at] = again, replace(primary[at], help=again.help if again is not None else None)
            secondary.append(found)
        elif key in reported or (group[0].follows and primary):
            secondary.append(found)
        else:
            primary.append(found)
            changes.append(repair)
        reported.add(key)
        if repair is None:
            left = {k: g for k, g in groups.items() if k != key}
        else:
            gone = [g for k, g in groups.items() if k not in left and k != key]
            secondary += [diagnostic(plan, g, None, _blamed(plan, g[0], None)) for g in gone]
            plan = repair.apply(plan)
        groups = left
    return *merged(primary, changes), secondary


def revised(changes: Sequence[Repair | None], repair: Repair | None) -> tuple[int, Repair | None] | None:
    """The place of an earlier change for the same names, and both changes as one (None if they cancel out); None without such a change."""
    if repair is None:
        return None
    same = ((i, one) for i, one in enumerate(changes) if one is not None and one.names == repair.names)
    return next(((i, replace(repair, old=one.old) if repair.new != one.old else None) for i, one in same), None)


def merged(diagnostics: list[Diagnostic], repairs: list[Repair | None]) -> tuple[list[Diagnostic], list[Repair | None]]:
    """One diagnostic for the same mistake at sibling modules (`{q,k}_norm`)."""
    kept: list[Diagnostic] = []
    changes: list[Repair | None] = []
    for one, repair in zip(diagnostics, repairs, strict=True):
        for i, (other, before) in enumerate(zip(kept, changes, strict=True)):
            both = combined(before, repair) if before and repair else None
            if before is not None and both is not None and one.code == other.code and one.primary == other.primary:
                kept[i] = replace(
                    other,
                    message=other.message.replace(before.pattern, both.pattern),
                    help=both.help,
                    modules=(*other.modules, *one.modules),
                )
                changes[i] = both
                break
        else:
            kept.append(one)
            changes.append(repair)
    return kept, changes


def grouped(findings: Iterable[Finding], tree: ModuleTree) -> Groups:
    """Equal findings of several layers together, in the order of the run."""
    return by_key((_key(finding, tree), finding) for finding in findings)


def _key(f: Finding, tree: ModuleTree) -> Key:
    source = f"{f.source.file}:{f.source.line}" if f.source else ""
    return (f.kind, tree.pattern(f.module), tree.pattern(f.subject), f.operation, source, f.actual, f.wanted)


def _fix(
    plan: ResolvedPlan, recorded: RecordedModel, groups: Mapping[Key, list[Finding]], search: Search
) -> tuple[Repair | None, Groups]:
    """The change that removes the first finding and leaves the fewest others, and the findings left. Of several such
    changes, the one whose run gets furthest. One that gives a split up comes after those that do not, if what they leave can be mended so too."""
    if search.over:
        return None, {}
    key, group = next(iter(groups.items()))
    # Whether a split is given up -> the best such change, and what it leaves.
    best: dict[bool, tuple[Repair, Groups]] = {}
    last, tried = BOUNDS.repairs, 0
    crashed = any(known[0] == "crash" for known in groups)

    def useless(finding: Finding) -> bool:
        """Whether a finding shows that the change is useless: it is the first finding again, or a new one that no crash can have hidden."""
        found = _key(finding, plan.tree)
        return found == key or (not crashed and found not in groups)

    first = group[0]
    own = chain(
        moved_inputs(plan, first),
        search.solved(plan, first),
        outside_repairs(plan, first, recorded.reference),
    )
    for repair in chain(own, repairs(plan, first)):
        if tried >= last or search.over:
            break
        changed = repair.apply(plan)
        if any(d.is_error for d in check_structure(changed, seq_len=None)):
            continue
        tried += 1
        proof = search.attempt(changed, recorded, useless)
        if proof.stopped:
            continue
        left, lost = grouped(proof.findings, plan.tree), bool(repair.given_up)
        if key not in left and (lost not in best or _rank(left) < _rank(best[lost][1])) and _better(groups, left):
            best[lost] = repair, left
            last = min(last, tried + BOUNDS.repairs_after_one)
        if False in best and not best[False][1]:
            break
    search.stuck = search.of_draft and not best
    if len(best) == 2 and len(best[True][1]) < len(best[False][1]):
        # Of a draft, any right plan is of use: it takes what leaves the fewest.
        if search.of_draft or not _mended(plan, recorded, *best[False], search):
            return best[True]
    return best.get(False) or best.get(True) or (None, {})


def _mended(
    plan: ResolvedPlan,
    recorded: RecordedModel,
    repair: Repair | None,
    left: Groups,
    search: Search,
) -> bool:
    """Whether all findings that a change leaves have changes that give no split up."""
    while repair is not None and not repair.given_up and left:
        plan = repair.apply(plan)
        repair, left = _fix(plan, recorded, left, search)
    return repair is not None and not repair.given_up


def _rank(left: Mapping[Key, Sequence[Finding]]) -> tuple[int, int]:
    """How good a change is by what it leaves, the lowest is best: how many findings, and how early a crash among them is."""
    return len(left), -max((group[0].at for key, group in left.items() if key[0] == "crash"), default=0)


def _better(before: Mapping[Key, Sequence[Finding]], after: Mapping[Key, Sequence[Finding]]) -> bool:
    """Whether a change fixes something. Every finding left was there before, or a crash had hidden it: it comes after
    the crash, or the crash is gone."""
    new = [group[0] for key, group in after.items() if key not in before]
    crashes = [_reached(group[0]) for key, group in before.items() if key[0] == "crash"]
    if not crashes:
        return not new
    return all(_reached(finding) > max(crashes) for finding in new) or not any(key[0] == "crash" for key in after)


def _reached(finding: Finding) -> tuple[int, bool]:
    """How far the run got: a crash in an operation comes after one between the same operations."""
    return (finding.at, finding.kind == "crash" and bool(finding.operation))


def _blamed(plan: ResolvedPlan, finding: Finding, repair: Repair | None) -> Assignment | None:
    """The rule to point at: the one to change, else the nearest one involved in the finding."""
    if repair is not None and repair.old is not None:
        blamed = plan.assignments[next(name for name in repair.names if name in plan.assignments)]
        if blamed.rule.location != OURS:
            placed = repair.placed
            return replace(blamed, rule=placed.old) if placed is not repair and placed.old is not None else blamed
    names = [*_with_parameters(plan, repair.names if repair else ()), finding.subject]
    for operand in sorted(finding.operands, key=lambda o: o.layout[0] not in "VP"):
        names += [operand.parameter or "", *_with_parameters(plan, operand.from_modules)]
    names += [finding.module, *ancestors(finding.module)]
    known = (plan.assignments[name] for name in names if name in plan.assignments)
    return next((assignment for assignment in known if assignment.rule.location != OURS), None)


def _with_parameters(plan: ResolvedPlan, names: Sequence[str]) -> list[str]:
    tree = plan.tree
    modules = [tree.modules[name] for name in names if name in tree.modules]
    return [*names, *(full_name(module.name, p.name) for module in modules for p in module.parameters)]


# The layouts on the axis cp: only its own rules apply, and they are typed like those of tp.
def with_cp(report: LayoutReport, rules: ResolvedPlan, recorded_models: Sequence[RecordedModel]) -> LayoutReport:
    """A report of the rules for tp, with the findings of those for cp.

    Args:
        rules: `ResolvedPlan.on_cp`, bound to the reduced model.
    """
    found = check_layout(rules, recorded_models, help=False)
    about = tuple(_with_help(rules, one) for one in found.diagnostics)
    return replace(
        report,
        diagnostics=(*report.diagnostics, *about),
        repairs=(*report.repairs, *(None for _ in about)),
        secondary=(*report.secondary, *found.secondary),
        read_results=found.read_results,
        on_cp=found,
        cross_module_reads=report.cross_module_reads
        or found.cross_module_reads,  # those of the model, whatever the axis
    )


def _with_help(rules: ResolvedPlan, finding: Diagnostic) -> Diagnostic:
    """The finding with the rule to write: a module that mixes tokens needs all of them."""
    tree = rules.tree
    for name in finding.modules:
        around = block(name)
        if element(around) and (part := name[len(around) + 1 :].partition(".")[0]):
            mixer = tree.address(tree.pattern(f"{around}.{part}"))
            return replace(finding, help=f"write `{mixer}: replicate_seq` under `context_parallel`")
    return finding
