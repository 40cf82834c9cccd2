"""The rules of one group of regions: the styles of its matrices, and the options that its code needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from shardplan.compiler.layout.finding import Kind
from shardplan.core.by_key import by_key
from shardplan.core.search_bounds import BOUNDS
from shardplan.core.tree import ModuleInfo, ModuleTree, ancestors, block, element, full_name, is_count, parent
from shardplan.model.forward_code import forward_reads
from shardplan.model.reduced.trace import Event
from shardplan.styles.head_counts import HEAD_SIZES

from .draft import NOWHERE, Draft, DraftTrials, Score, divided, sharing
from .flow import Flow
from .forbidding import Forbidden, forbidden
from .regions import Group
from .split_candidates import SplitCandidates
from .states import States

# A group with a smaller share of its blocks' parameters stays whole. Splitting it costs the same number of collectives in each block as
# for an MLP, which take the same time for an indexer's or router's matrices as for wide ones, and saves a rank at most this memory.
LEAST = 0.005


@dataclass(frozen=True, slots=True)
class Solved:
    """The solution for a group.

    Args:
        draft: its rules; None where there are none.
        against: the wrong draft that runs furthest without gathers; if there is a draft too, it gathers the matrices' results.
        reached: how far the wrong draft runs.
    """

    draft: Draft | None
    against: Draft | None = None
    reached: Score = NOWHERE


class Solver:
    """Finds the rules of regions.

    Args:
        trials: tries drafts on the reduced model.
        flow: the unsharded run.
        tree: the tree of the model itself.
    """

    def __init__(self, trials: DraftTrials, flow: Flow, tree: ModuleTree):
        self.trials, self.flow, self.tree = trials, flow, tree
        self.candidates = SplitCandidates(trials, flow, tree)

    def solve(self, group: Group) -> Solved:
        """Rules that split a group and are right on their own; where none are found, the best of the wrong ones."""
        if not self.candidates.experts(group) and self._share(group) < LEAST:
            return Solved(None)
        state = self._with_state(group)
        solved = state if state.draft is not None else self._split_through(group)
        if solved.draft is not None:
            return solved
        gathered = None if self.candidates.experts(group) else self.trials.fixed(self.candidates.gathered(group))
        return Solved(gathered, state.against or solved.against)

    def why(self, group: Group, solved: Solved) -> Forbidden:
        """The reason against splitting a group without gathers."""
        if solved.against is not None:
            return forbidden(self.trials, solved.against)
        share = self._share(group)
        return Forbidden(f"they are {share:.2%} of the parameters of their blocks: to reduce their results costs more")

    def _with_state(self, group: Group) -> Solved:
        """Split the states of a state space or linear attention layer, if the group belongs to one."""
        states = States(self.trials, self.flow, self.tree, group) if group.container is None else None
        if states is None or not states.has_state:
            return Solved(None)
        draft, best = states.solved()
        return Solved(draft, best if draft is None else None)

    def _split_through(self, group: Group) -> Solved:
        """Split the group without gathers between the first matrices and the last."""
        solved = self._best_of(group, self.candidates.drafts(group))
        if solved.draft is None and (narrow := list(self.candidates.narrow(group))):
            other = self._best_of(group, narrow)
            return other if other.draft is not None or other.reached > solved.reached else solved
        return solved

    def _best_of(self, group: Group, drafts: Iterable[Draft]) -> Solved:
        """The draft that runs furthest, with the changes that its code needs."""
        scored: list[tuple[Score, Draft]] = []
        first = None
        for draft in drafts:
            first = first or draft
            if (score := self.trials.score(draft)) is not None:
                scored.append((score, draft))
                if score.fits:
                    break
        assert first is not None
        if not scored:
            return Solved(None, first)
        furthest = max(score for score, _ in scored)
        # A wrong way may run further by chance: heads cut in halves have the shapes of half the heads.
        worth = [draft for score, draft in scored if score == furthest]
        tried: list[Solved] = []
        for draft in (*worth, *(() if first in worth else (first,))):
            tried.append(self._as_needed(group, draft))
            if tried[-1].draft is not None:
                return tried[-1]
        return tried[0]

    def _as_needed(self, group: Group, draft: Draft) -> Solved:
        """A draft that also divides the numbers that its code needs divided."""
        score = self.trials.score(draft)
        if score is not None and not score.fits:
            draft = self._divided(group, draft, score)
        reached = self.trials.score(draft) or NOWHERE
        fixed = self.trials.fixed(draft) if reached.fits else None
        return Solved(fixed, draft if fixed is None else None, reached)

    def _share(self, group: Group) -> float:
        """A group's share of its blocks' parameters, in the model itself."""
        sizes = {name: parameter.numel for name, (_, parameter) in self.tree.parameters.items()}
        own = self.tree.under((*group.columns, *group.rows))
        blocks = set(map(block, own))
        return sum(sizes[name] for name in own) / sum(sizes[name] for name in sizes if block(name) in blocks)

    def _divided(self, group: Group, draft: Draft, score: Score) -> Draft:
        """The draft that also divides attributes and splits vectors with which it runs further: one by one, or two where both
        are needed."""
        for _ in range(BOUNDS.divided):
            found = (
                self._best(self._further(group, draft), score)
                or self._best(self._pairs(group, draft), score)
                or self._best(self._pairs(group, draft, of_config=True), score)
            )
            if found is None:
                return draft
            score, draft = found
            if score.fits:
                break
        return draft

    def _best(self, drafts: Iterable[Draft], score: Score) -> tuple[Score, Draft] | None:
        """The draft that runs furthest, if further than a score; the first that fits ends the search."""
        best = None
        for draft in drafts:
            reached = self.trials.score(draft)
            if reached is not None and reached > (score if best is None else best[0]):
                best = reached, draft
                if reached.fits:
                    break
        return best

    def _further(self, group: Group, draft: Draft) -> Iterator[Draft]:
        wrong = self._wrong(group, draft)
        for pattern in (
            self.trials.tree.pattern(name) for name in wrong if self.trials.tree.modules[name].kind == "norm"
        ):
            if pattern not in draft.tensor_parallel:
                yield draft.with_rules({pattern: {"style": "colwise_norm"}})
        for name in (n for one in wrong for n in self.trials.tree.children[one]):
            if self.trials.tree.modules[name].class_name == "Identity":  # an expert that only returns its input
                yield draft.with_rules({self.trials.tree.pattern(name): {"style": "moe_identity_expert"}})
        numbers = self._attributes({**self._modules(group), **wrong})
        for pattern, attribute in numbers:
            yield from _dividing(draft, pattern, attribute)
        for pattern, attributes in _together(numbers):
            yield from _dividing(draft, pattern, *attributes)
        for name in wrong:
            yield from reading_shares(self.flow, draft, name, self.trials.tp, self.tree)
        for pattern, owner in self._vectors(group, wrong).items():
            if pattern not in draft.tensor_parallel:
                ways = [draft.tensor_parallel[column] for column in group.columns if column in draft.tensor_parallel]
                packed = [{**one, "style": "packed_colwise"} for one in ways if one["style"].startswith("packed_")]
                styles = ("colwise", "rowwise", "headwise", "replicated_divided")
                for options in (*packed, *({"style": style} for style in styles)):
                    yield self._holding(draft, owner).with_rules({pattern: options})

    def _pairs(self, group: Group, draft: Draft, *, of_config: bool = False) -> Iterator[Draft]:
        """The drafts that divide two attributes of the module that raises, or two configuration numbers that its code reads."""
        wrong = self._wrong(group, draft, "crash")
        reads = {
            name
            for one in wrong
            for name in forward_reads(type(self.trials.recorded_models[0].model.get_submodule(one)))
        }
        own = [
            found
            for found in self._attributes(wrong)
            if found[1].startswith("config.") is of_config
            and (not of_config or found[1].removeprefix("config.") in reads)
        ]
        for one, other in combinations(own, 2):
            yield from (both for first in _dividing(draft, *one) for both in _dividing(first, *other))

    def _wrong(self, group: Group, draft: Draft, kind: Kind | None = None) -> Mapping[str, None]:
        """The module in a block whose code has the first finding, or the first finding of a kind; the block itself where it calls
        the group's matrices."""
        found = next((f.module for f in self.trials.hard(draft) if kind in (None, f.kind)), "")
        return {} if not found or (element(found) and found not in self._modules(group)) else {found: None}

    def _holding(self, draft: Draft, module: str) -> Draft:
        """The draft in which parameters may have rules that differ from their module's rule."""
        rule = draft.tensor_parallel.get(module, {})
        return draft.with_rules({module: {"style": "local_params"}}) if rule.get("style") == "replicate" else draft

    def _vectors(self, group: Group, wrong: Mapping[str, None]) -> Mapping[str, str]:
        """Patterns of parameters that the group's modules own and that are not its matrices -> their modules' patterns. These
        are parameters with one number per head, biases of experts and of matrices by which another module multiplies, and
        weights of the wrong norm."""
        pattern, modules, matrices = self.trials.tree.pattern, self._modules(group), (*group.columns, *group.rows)

        def own(owner: ModuleInfo) -> bool:
            if owner.kind in ("other", "norm"):
                return owner.name in wrong or (owner.name in modules and owner.kind == "other")
            return pattern(full_name(owner.name, "weight")) in matrices

        found = {
            pattern(full): pattern(owner.name)
            for full, (owner, p) in self.trials.tree.parameters.items()
            if own(owner) and any(n % self.trials.tp == 0 for n in p.shape)
        }
        return {name: owner for name, owner in found.items() if name not in matrices}

    def _modules(self, group: Group) -> Mapping[str, None]:
        """The modules of the group's matrices, and the modules around them in the block; the block itself where the matrices are
        its own (XLM's lists of attentions)."""
        tree = self.trials.tree
        own = {self.trials.tree.pattern(full): owner.name for full, (owner, _) in tree.parameters.items()}
        return dict.fromkeys(
            other
            for pattern in (*group.rows, *group.columns)
            for name in (*tree.modules, own.get(pattern, ""))
            if name and (self.trials.tree.pattern(name) == pattern or name == own.get(pattern))
            for other in (name, *ancestors(name))
            if other and (other != block(name) or other == parent(name)) and other not in ancestors(block(name))
        )

    def _attributes(self, modules: Iterable[str]) -> Iterable[tuple[str, str]]:
        """Numbers of modules that may count the split parts: (pattern of the module, attribute). Heads are split, not their features."""
        owners = [self.trials.tree.modules[name] for name in modules]
        numbers = (
            (self.trials.tree.pattern(owner.name), attribute, value)
            for owner in owners
            for prefix, own in (("", owner.numbers), ("config.", owner.config or {}))
            for attribute, value in ((f"{prefix}{name}", n) for name, n in own.items())
        )
        counts = (
            (one, name)
            for one, name, n in numbers
            if name.rpartition(".")[2] not in HEAD_SIZES and type(n) is int and n > 1 and n % self.trials.tp == 0
        )
        return dict.fromkeys(counts)


def _dividing(draft: Draft, pattern: str, *attributes: str) -> Iterator[Draft]:
    """The draft that divides attributes of a module too, if it does not yet."""
    rule = draft.tensor_parallel.get(pattern, {"style": "replicate"})
    if more := [one for one in attributes if one not in divided(rule)]:
        yield draft.with_rules({pattern: sharing(rule, more)})


def _together(numbers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Sequence[str]]]:
    """The numbers of one list, which code uses together: the lengths by which it cuts."""
    listed = (
        ((pattern, path.rpartition(".")[0]), path) for pattern, path in numbers if path.rpartition(".")[2].isdigit()
    )
    for (pattern, _), paths in by_key(listed).items():
        if len(paths) > 2:  # two are tried as any others are
            yield pattern, paths


# Biases, masks and decays for all heads that a module gets as arguments, or keeps as buffers: each rank reads its share.
KNOWN = ("num_attention_heads", "num_key_value_heads")  # the likeliest names for a number of heads


def reading_shares(flow: Flow, draft: Draft, module: str, tp: int, tree: ModuleTree) -> Iterator[Draft]:
    """Drafts in which a module reads its share of the values with an entry for each head. The number of heads is one of the
    module's numbers or, where none fits, the size of a dim of an argument or buffer.

    Args:
        flow: the reduced model's.
        draft: the draft; the numbers that its rule divides are tried first.
        module: the module's name.
        tree: the tree of the model itself.
    """
    info, pattern = flow.tree.modules[module], flow.tree.pattern(module)
    rule = draft.tensor_parallel.get(pattern, {"style": "replicate"})
    called = next((e for e in flow.run.events if e.kind == "enter" and e.module == module), None)
    given = {} if called is None else _shapes(flow, called)
    counts = map(info.numbers.get, divided(rule))
    places = (size for shape in (*info.buffers.values(), *given.values()) for size in shape)
    known_counts = filter(is_count, (*counts, *info.numbers.values(), *places))
    for heads in dict.fromkeys(n for n in known_counts if n > 1 and n % tp == 0):
        buffers = [{name: {"dim": shape.index(heads)}} for name, shape in info.buffers.items() if heads in shape]
        batch = 1 if called is None else flow.run.values[called.inputs[0]].shape[0]
        arguments = list(_with_heads(given, heads, batch, _words(heads, flow.tree, tree)))
        ways = [buffers] if buffers else []
        ways += [[one] for one in arguments]
        ways += [[*arguments, *buffers]] if len(ways) > 1 else []
        known = {name for one in rule.get("shares", ()) if isinstance(one, Mapping) for name in one}
        for way in ways:
            if not any(name in known for one in way for name in one):
                yield draft.with_rules({pattern: sharing(rule, way)})


def _shapes(flow: Flow, called: Event) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a call's arguments after the first: those with numbers or masks, but not positions."""
    given = list(zip(called.names, (flow.run.values[number] for number in called.inputs), strict=True))[1:]
    return {n: tuple(value.shape) for n, value in given if value.is_floating_point() or value.dtype == torch.bool}


def _with_heads(
    shapes: Mapping[str, tuple[int, ...]], heads: int, batch: int, words: str | None
) -> Iterator[dict[str, dict[str, Any]]]:
    """The shares of arguments with a dim for the heads, or for the heads of all sequences of the batch."""
    for name, shape in shapes.items():
        if heads in shape:
            yield {name: {"dim": shape.index(heads)}}
        elif batch * heads in shape and words is not None:
            yield {name: {"dim": shape.index(batch * heads), "heads": words}}


def _words(heads: int, reduced: ModuleTree, tree: ModuleTree) -> str | None:
    """The configuration's number of heads, by its name; for a model without a configuration, the number itself."""
    if not tree.numbers:
        return str(heads)
    names = (name for name in (*KNOWN, *reduced.numbers) if name in reduced.numbers and name in tree.numbers)
    return next((name for name in names if reduced.numbers[name] == heads), None)
