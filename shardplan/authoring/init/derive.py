"""Deriving a tensor-parallel plan for any model, from the model's structure and its run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardplan.authoring.router_runs import recorded_with_routers
from shardplan.compiler.bind import bind
from shardplan.compiler.check import check, half_covered
from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.cross_module_reads import below, joined_reads
from shardplan.compiler.layout.model import ModelLayouts
from shardplan.compiler.layout.solver.draft import PARTIAL, Draft, DraftTrials, Options, partial_gradients
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.compiler.layout.solver.forbidding import Forbidden, forbidden
from shardplan.compiler.layout.solver.regions import Group, grouped, regions
from shardplan.compiler.layout.solver.solve import Solved, Solver
from shardplan.core.diagnostics import PlanError
from shardplan.core.layout import R
from shardplan.core.mesh import MeshSizes
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleTree, ancestors, block, full_name, part
from shardplan.model import FoundModel
from shardplan.model.forward_code import argument_names
from shardplan.styles import STYLES
from shardplan.styles.block_inputs import BLOCK_INPUT

from .distributed import with_distributed
from .init_stages import pipeline_section
from .init_sums import with_merged_block_inputs, with_sums
from .layer_kinds import kinded, plain, together
from .overlay import with_overlay

HALF_COVERED = (half_covered.SIBLING, half_covered.PARAMETER)
EMBEDDING: Options = {"style": "embedding_rowwise"}
ELSEWHERE = "is at another place of its list in the model than in the reduced model, which has fewer layers"
LARGE = 0.05  # a matrix with at least this share of all parameters is reported where it stays whole
HEAD: Options = {"style": "colwise_gather_output", "optional": True}


@dataclass(frozen=True, slots=True)
class Whole:
    """A part of the model that stays whole on every rank.

    Args:
        patterns: those of its matrices.
        forbidden: the reason against splitting them.
    """

    patterns: tuple[str, ...]
    forbidden: Forbidden


@dataclass(frozen=True, slots=True)
class Derived:
    """A plan that was found.

    Args:
        draft: the rules, which pass the layout check.
        tree: the tree of the reduced model on which they were tried.
        whole: the parts that could not be split.
        gathered: the parts whose matrices are split but gathered one by one, as what is between them could not be split.
        read_outside: the patterns of modules with parameters that the code of a module around them reads.
        tries: the number of runs of drafts.
        no_overlay: why no sequence parallelism was found, where it was wanted.
        no_experts: why no expert parallelism was found, where it was wanted.
        pipeline: the fields of `pipeline_parallel`; None where the model cannot be cut into stages.
    """

    draft: Draft
    tree: ModuleTree
    whole: tuple[Whole, ...]
    tries: int
    no_overlay: str | None = None
    no_experts: str | None = None
    pipeline: dict[str, Any] | None = None
    gathered: tuple[Whole, ...] = ()
    read_outside: frozenset[str] = frozenset()


def derive(
    found: FoundModel,
    tp: int = 2,
    *,
    sequence_parallel: bool = False,
    expert_parallel: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Derived:
    """Find a plan: split every region for which right rules are found, and leave the rest whole.

    Args:
        tp: the size for which it is tried; the reduced model keeps the divisibility of its numbers by it.
        sequence_parallel: also find a sequence-parallel section.
        expert_parallel: also find rules that distribute the experts.
        progress: called with what is being tried.

    Raises:
        PlanError: SP520 to SP523: there is no reduced model, or it does not run; SP371: its code draws random numbers.
    """
    progress("running a reduced model")
    layouts = ModelLayouts(found, tp)
    recorded_models = _fullest_first(recorded_with_routers(layouts))
    if layouts.random is not None:
        raise PlanError((layouts.random,))
    tree = replace(recorded_models[0].tree, base_prefix="")
    derived = _with_kinds(recorded_models, tree, found.tree, tp, progress, sequence_parallel=sequence_parallel)
    progress("distributing the experts")
    if expert_parallel:
        distributed = with_distributed(ModelLayouts(found, tp, tp), derived.draft)
        derived = (
            replace(derived, no_experts=distributed)
            if isinstance(distributed, str)
            else replace(derived, draft=distributed)
        )
    outside = frozenset(_read_outside(recorded_models, tree))
    return replace(derived, pipeline=pipeline_section(recorded_models, found.tree), read_outside=outside)


def _read_outside(recorded_models: Iterable[RecordedModel], tree: ModuleTree) -> Iterator[str]:
    for reader, names in joined_reads(one.cross_module_reads for one in recorded_models).items():
        for name in names:
            yield from (tree.pattern(above) for above in ancestors(name) if below(above, reader))


def _with_kinds(
    recorded_models: tuple[RecordedModel, ...],
    reduced: ModuleTree,
    tree: ModuleTree,
    tp: int,
    progress: Callable[[str], None],
    *,
    sequence_parallel: bool,
) -> Derived:
    """The results with separate patterns for kinds of layers, where they make one plan; else those without.

    Args:
        reduced: the tree of the reduced model.
        tree: the model's own.
    """
    told, own = kinded(reduced, tree)
    if told is not reduced:
        trials = DraftTrials(recorded_models, tp, told)
        derived = _search(trials, own, progress, sequence_parallel=sequence_parallel)
        draft = together(derived.draft, told)
        if draft is not None and trials.right(draft):
            return replace(derived, draft=draft, tries=BOUNDS.drafts - trials.search.tries)
    return _search(DraftTrials(recorded_models, tp, reduced), tree, progress, sequence_parallel=sequence_parallel)


def _search(
    trials: DraftTrials, tree: ModuleTree, progress: Callable[[str], None], *, sequence_parallel: bool
) -> Derived:
    """Rules for all groups that can be split, for the vocabulary, and, where wanted, for the sequence.

    Args:
        tree: the model's own.
    """
    flow = Flow(trials.recorded_models[0].reference, trials.tree)
    solver = Solver(trials, flow, tree)
    draft, whole, gathered = Draft({}), list[Whole](), list[Whole]()
    groups = list(grouped(regions(flow), flow))
    named = {tree.pattern(name) for name in (*tree.modules, *tree.parameters)}
    for group in groups:
        if absent := [matrix for matrix in (*group.columns, *group.rows) if matrix not in named]:
            whole.append(_whole(group, Forbidden(f"{plain(absent[0])} {ELSEWHERE}")))
            continue
        progress(f"splitting {', '.join(map(plain, (*group.columns, *group.rows)))}")
        solved = solver.solve(group)
        more = _with_group(solver, group, draft, solved)
        if isinstance(more, Draft):
            draft = more
            gathered += [] if solved.against is None else [_whole(group, solver.why(group, solved))]
        elif len(group.regions) > 1:
            # A group that is wrong together with others may be right alone, where nothing has split it yet.
            groups += [Group((region,)) for region in group.regions if region.row not in draft.tensor_parallel]
        else:
            whole.append(_whole(group, more))
    progress("splitting the vocabulary")
    draft = with_merged_block_inputs(
        trials, flow, tree, with_block_inputs(trials, flow, with_vocabulary(trials, flow, draft))
    )
    progress("splitting the sequence")
    overlaid = with_overlay(trials, flow, draft) if sequence_parallel else draft
    reason = overlaid if isinstance(overlaid, str) else None
    result = draft if isinstance(overlaid, str) else overlaid
    result = with_sums(trials, with_whole_named(result, trials.tree, trials.tp))
    whole += list(_alone(flow, tree, draft, {name for one in (*whole, *gathered) for name in one.patterns}))
    tries = BOUNDS.drafts - trials.search.tries
    return Derived(result, trials.recorded_models[0].tree, tuple(whole), tries, reason, gathered=tuple(gathered))


def _alone(flow: Flow, tree: ModuleTree, draft: Draft, told: Collection[str]) -> Iterator[Whole]:
    """The large matrices that stay whole because nothing reads their results in parts.

    Args:
        tree: the model's own.
        told: patterns for which another finding says why they stay whole.
    """
    everything = sum(parameter.numel for _, parameter in tree.parameters.values())
    for pattern in dict.fromkeys(flow.tree.pattern(product.name) for product in flow.products.values()):
        weights = [
            m.parameter("weight") for n, m in tree.modules.items() if tree.pattern(n) == pattern and m.kind == "linear"
        ]
        size = sum(weight.numel for weight in weights if weight is not None)
        if size < LARGE * everything or plain(pattern) in told or pattern in draft.tensor_parallel:
            continue
        gathered = f"write `{pattern}: {HEAD['style']}`: a rank stores a part of it, and its result is gathered"
        yield Whole(
            (plain(pattern),), Forbidden("no matrix after it in its block sums up what is made of its result", gathered)
        )


def _whole(group: Group, why: Forbidden) -> Whole:
    """The parts that stay whole in a group of one kind of layers, with a plan's patterns."""
    matrices = dict.fromkeys(map(plain, (*group.columns, *group.rows)))
    return Whole(tuple(matrices), why)


def with_whole_named(draft: Draft, tree: ModuleTree, tp: int) -> Draft:
    """The draft with a rule for each module that stays whole next to split ones, to show that this is intended."""
    plan = draft.plan()
    if plan is None or not draft.tensor_parallel:
        return draft
    resolved, _ = bind(plan, tree, MeshSizes(tp=tp))
    names = (name for d in check(resolved, seq_len=None) if d.code in HALF_COVERED for name in d.modules)
    return draft.with_rules(dict.fromkeys(map(tree.pattern, names), {"style": "replicate"}))


def _with_group(solver: Solver, group: Group, draft: Draft, solved: Solved) -> Draft | Forbidden:
    """The draft with the rules of a group added, or the reason that forbids them."""
    if solved.draft is None:
        return solver.why(group, solved)
    both = draft.with_rules(solved.draft.tensor_parallel)
    return solver.trials.fixed(both) or forbidden(solver.trials, both)


def _fullest_first(recorded_models: tuple[RecordedModel, ...]) -> tuple[RecordedModel, ...]:
    """The inputs; first comes one that runs all modules of the first kind of input and more of the same blocks (for example
    cross-attention, which runs where a decoder gets an encoder's states)."""
    first, *others = ({e.module for e in recorded.reference.events if e.kind == "op"} for recorded in recorded_models)
    blocks = set(map(block, first))
    for number, ran in enumerate(others, 1):
        if ran > first and blocks.issuperset(map(block, ran)):
            return (recorded_models[number], *recorded_models[:number], *recorded_models[number + 1 :])
    return recorded_models


def with_vocabulary(trials: DraftTrials, flow: Flow, draft: Draft) -> Draft:
    """The draft with the token embedding and the output head split too, where this is right."""
    rows = trials.tree.numbers.get("vocab_size") or _largest_table(trials)
    embeddings, heads = [], []
    for product in dict.fromkeys(flow.products.values()):
        module = trials.tree.modules.get(product.name)
        weight = None if module is None else module.parameter("weight")
        if module is None or weight is None or weight.shape[0] != rows or product.name in draft.tensor_parallel:
            continue
        pattern = trials.tree.pattern(product.name)
        if pattern != product.name and block(product.name) != product.name:
            continue  # it belongs to a layer
        if module.kind == "embedding":
            embeddings.append(pattern)
        elif module.kind == "linear":
            heads.append(pattern)  # of a list of heads too
    split = {**dict.fromkeys(embeddings, EMBEDDING), **dict.fromkeys(heads, HEAD)}
    for names in ((*embeddings, *heads), heads, embeddings):
        if names:
            tied = {
                bias: {"style": "colwise", "optional": True}
                for name in names
                if name in heads
                for bias in tied_to(trials, name)
            }
            more = trials.fixed(draft.with_rules({**{name: split[name] for name in names}, **tied}))
            if more is not None:
                return more
    return draft


def _largest_table(trials: DraftTrials) -> int:
    """The number of rows of the longest table outside the blocks, which is that of the tokens."""
    tables = (
        m for name, m in trials.tree.modules.items() if m.kind == "embedding" and trials.tree.pattern(name) == name
    )
    weights = (module.parameter("weight") for module in tables)
    return max((weight.shape[0] for weight in weights if weight is not None), default=0)


def tied_to(trials: DraftTrials, head: str) -> tuple[str, ...]:
    """Other names of a head's bias."""
    bias = full_name(head, "bias")
    return tuple(name for group in trials.tree.tied if bias in group for name in group if name != bias)


def with_block_inputs(trials: DraftTrials, flow: Flow, draft: Draft) -> Draft:
    """The draft with one block input around modules that read the same value and each move it themselves."""
    report = trials.report(draft)
    if report is None:  # there is no rule, so no plan to check
        return draft
    block_inputs: dict[str, Options] = {}
    for read in report.reads:
        pattern = trials.tree.pattern(read.module)
        rule = draft.tensor_parallel.get(pattern, {"style": "replicate"})
        if rule["style"] == "replicate" or rule == PARTIAL:
            first = argument_names(trials.recorded_models[0].model.get_submodule(read.module))[0]
            moved = moved_alike(flow, pattern) if read.argument == first else {"argument": read.argument}
            block_inputs[pattern] = {"style": BLOCK_INPUT, **moved}
        if rule == PARTIAL:  # a block input does not concern the module's own parameters
            own = partial_gradients(pattern, trials.tree.modules[read.module])
            block_inputs |= {name: options for name, options in own.items() if name not in draft.tensor_parallel}
    draft = trials.fixed(draft.with_rules(block_inputs)) or draft
    for pattern in lone_blocks(trials, draft):
        more = draft.with_rules({pattern: {"style": BLOCK_INPUT, **moved_alike(flow, pattern)}})
        report = trials.report(more)
        if report is not None and report.ok:
            draft = more
    return draft


def lone_blocks(trials: DraftTrials, draft: Draft) -> tuple[str, ...]:
    """Parts of blocks with a matrix that moves its own input. A block input at the part may do this instead: the sequence
    is gathered there, and people look for it there."""
    found: dict[str, None] = {}
    for name in trials.tree.modules:
        around_it = part(name)
        rule = draft.tensor_parallel.get(trials.tree.pattern(name))
        if around_it in (None, name) or trials.tree.modules[around_it].kind == "list":  # a list is not called
            continue
        if rule is not None and R in STYLES[rule["style"]].input_sources:
            around = {draft.tensor_parallel.get(trials.tree.pattern(a), {}).get("style") for a in ancestors(name)}
            if BLOCK_INPUT not in around:
                found[trials.tree.pattern(around_it)] = None
    return tuple(found)


def moved_alike(flow: Flow, pattern: str) -> Options:
    """The block input's option that moves the arguments that are the same tensor as the first."""
    alike = dict.fromkeys(flow.alike(pattern), BLOCK_INPUT)
    return {"arguments": alike} if alike else {}
