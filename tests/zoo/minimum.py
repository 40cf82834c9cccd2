"""The fewest collectives of a step, from the unsharded run and the list of what is split: nothing of the program is read.

A matrix that is split by its output features makes a split value, one that is split by its input features makes of it a
partial sum, as does a table that is split by rows. Partial sums may be added to each other and to whole values, cut and
reshaped; anything else needs the sum, which is then reduced once, whatever reads it. So the number of reductions forward is
that of the sums that are needed. Backward it is the same: the gradient of what a split part reads is a partial sum, which
what stands before the part needs whole; only that of a table's rows needs none, that of a split head one more (Megatron-LM,
arXiv 1909.08053; with the sequence split each reduction is a reduce-scatter and each part begins with an all-gather, arXiv
2205.05198). Whole parameters that meet split values have partial gradients, which one all-reduce for each block sums; with
the sequence split those of all whole parameters are.

Rows that several ranks compute with (key-value heads, B and C of a state space, fewer than ranks) are stored once: for each run of
a block they are gathered once, and their gradients reduce-scattered once. That they are gathered again backward, not to be
kept, is above the minimum.

A norm over split features (of all heads together) needs the sum of each of its means, forward and backward; for a norm whose
input a plan gathers, this is left out.

The fewest are not always the least to reduce: what a plan has more of backward is weighed by block inputs.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Literal

from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.compiler.lower import lower, shared_parameters, split_parameters
from shardplan.core.layout import SEQ, I, V
from shardplan.core.module_program import ModuleProgram
from shardplan.core.moves import move_ops
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree, block, element, full_name
from shardplan.model.reduced.trace import Event, Trace
from shardplan.styles import STYLES

from .block_inputs import NOTHING, BlockInputs, Effect, Frontier, Size, joined
from .sizes import Sizes, tokens

Features = Literal["out", "in", "rows"]
SHARES = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}  # of what an all-reduce of a value moves
Kind = Literal["whole", "split", "sum"]

# What of a sum makes a sum.
LINEAR = frozenset(
    """__add__ __radd__ __iadd__ __sub__ add add_ sub view reshape transpose permute contiguous to float type_as clone
    squeeze unsqueeze flatten unflatten expand expand_as chunk split __getitem__ index_select gather dropout index_add_ index_add
    sum movedim __setitem__ cat type half bfloat16 T.__get__""".split()
)
SCALING = frozenset("mul __mul__ __rmul__ div __truediv__ mul_ __imul__".split())  # this too, by a whole factor


def spent(resolved: ResolvedPlan, recorded: RecordedModel, tree: ModuleTree) -> tuple[int, Size]:
    """What a plan without sequence parallelism reduces backward: how many collectives, of how much.

    Args:
        resolved: as it is lowered.
        recorded, tree: see `minimum`.
    """
    count, size = 0, NOTHING
    sizes = Sizes(Flow(recorded.reference, recorded.tree), tree, tokens(recorded))
    times = Counter(event.module for event in recorded.reference.events if event.kind == "enter")
    programs = lower(resolved).modules
    for name, program in programs.items():
        count += times[name] * (program.group is not None)
        summed = program.group.parameters if program.group is not None else ()
        size += Size(0, sum(sizes.parameter(full_name(full_name(name, module), p)) for module, p in summed))
    for number in means(resolved, recorded.reference):
        count += 1
        size += Size(sizes.value(number), 0)
    for event in recorded.reference.events:
        program = programs.get(event.module)
        for number, share in () if program is None else _moved(recorded.reference, event, program):
            count += 1
            size += Size(sizes.value(number) * share, 0)
        if program is not None and program.tail and event.kind == "leave":
            count += 1
            size += Size(tree.numbers[STYLES[program.style].features.tail], 0)
    return count, size


def _moved(run: Trace, event: Event, program: ModuleProgram) -> Iterator[tuple[int, float]]:
    """The values whose gradient a module's moves communicate, and how much of an all-reduce of it that is."""
    if event.kind == "enter":
        named = dict(zip(event.names, event.inputs, strict=True))
        for move in program.enter:
            if move.shared_with is not None:
                continue
            share = SHARES.get(move_ops(move.src, move.dst).backward, 0)
            moved = event.inputs if move.argument == "*" else (named.get(move.argument or event.names[0]),)
            if share:
                yield from ((number, share) for number in moved if number is not None and run.requires_grad[number])
    if event.kind == "leave" and program.leave is not None and program.link != "source" and program.joins is None:
        share = SHARES.get(move_ops(program.leave.src, program.leave.dst).backward, 0)
        if share:
            yield event.inputs[0], share


def minimum(resolved: ResolvedPlan, recorded: RecordedModel) -> dict[str, dict[str, int]]:
    """The fewest collectives on the tp axis of a step in which the same parameters are split.

    Args:
        resolved: says which; bound to the reduced model.
        recorded: the unsharded run.
    """
    run = reductions(Flow(recorded.reference, recorded.tree), split_features(resolved))
    forward, backward = Counter(), Counter()
    parts = run.count - run.tables
    groups = len(set(map(_home, run.partial)))
    if resolved.sequence_parallel:
        gathers = _whole_parts(resolved, recorded)
        groups = len({_home(name) for name in run.whole if element(block(name)) or run.is_read_split(name)})
        forward.update(reduce_scatter=run.count, all_gather=parts + 1 + gathers)
        backward.update(reduce_scatter=parts + run.heads, all_gather=parts + 1 + gathers)
    else:
        forward.update(all_reduce=run.count)
        backward.update(all_reduce=parts + run.heads)
    of_means = sum(1 for _ in means(resolved, recorded.reference))
    forward.update(all_reduce=of_means)
    backward.update(all_reduce=groups + of_means)
    forward.update(all_gather=run.heads)  # the logits
    for runs, trained in _shared_rows(resolved, recorded.reference):
        forward.update(all_gather=runs)
        backward.update(reduce_scatter=runs * trained)
    return {
        when: {op: n for op, n in sorted(counts.items()) if n}
        for when, counts in (("forward", forward), ("backward", backward))
    }


def choices(resolved: ResolvedPlan, recorded: RecordedModel, tree: ModuleTree) -> Frontier:
    """What a step without sequence parallelism has to reduce backward, by where it is reduced.

    Args:
        resolved, recorded: see `minimum`.
        tree: the model's own, for the sizes.
    """
    flow = Flow(recorded.reference, recorded.tree)
    run = reductions(flow, split_features(resolved))
    sizes = Sizes(flow, tree, tokens(recorded))
    of_means = [sizes.value(number) for number in means(resolved, recorded.reference)]
    return joined(BlockInputs(flow, run.effects, sizes, run.home).frontier, {len(of_means): Size(sum(of_means), 0)})


def _shared_rows(resolved: ResolvedPlan, run: Trace) -> Iterator[tuple[int, bool]]:
    """Of each block's parameters that are gathered from the same ranks: how often the block runs, and whether they learn."""
    times = Counter(event.module for event in run.events if event.kind == "enter")
    groups: dict[tuple[str, int], list[str]] = {}
    for name, found in shared_parameters(resolved).items():
        for copies in found:
            groups.setdefault((_home(name), copies), []).append(name)
    for (home, _), names in groups.items():
        yield times[home], any(resolved.tree.parameters[name][1].requires_grad for name in names)


def means(resolved: ResolvedPlan, run: Trace) -> Iterator[int]:
    """The means over features that the plan splits: each is a sum forward, and so is its gradient."""
    norms = {name for name, assignment in resolved.modules.items() if STYLES[assignment.rule.style].features.means}
    for event in run.events:
        if event.kind == "op" and event.name == "mean" and event.module in norms:
            yield from event.outputs


def split_features(resolved: ResolvedPlan) -> Mapping[str, Features]:
    """Module or parameter -> which of its features the plan splits: "rows" where that makes a sum of a whole value. Where a
    result inside a block is gathered at once, what reads it is as if nothing was split."""
    split: dict[str, Features] = {}
    gathered: set[str] = set()
    for name, assignment in resolved.assignments.items():
        style = STYLES[assignment.rule.style]
        if style.splits_rows or (style.weight.shard == "in" and style.input_sources == (I,)):
            split[name] = "rows"
        elif style.weight.shard == "out" and style.output_destination is not None and element(block(name)):
            gathered.update((name, f"{name}.weight", f"{name}.bias"))
        elif style.weight.shard is not None:
            split[name] = style.weight.shard
    return {**dict.fromkeys(split_parameters(resolved) - gathered, "out"), **split}


def _whole_parts(resolved: ResolvedPlan, recorded: RecordedModel) -> int:
    """How often parts run that are whole and need the whole sequence: each gathers it, and the gradient of its own result."""
    whole = whole_parts(resolved)
    return sum(event.kind == "enter" and event.module in whole for event in recorded.reference.events)


def whole_parts(resolved: ResolvedPlan) -> frozenset[str]:
    """The modules that every rank computes in full, for the whole sequence, between shards of it."""
    styles = {name: STYLES[assignment.rule.style] for name, assignment in resolved.modules.items()}
    return frozenset(
        name for name, style in styles.items() if style.input_destination == I and style.output_destination == V(SEQ)
    )


def _home(name: str) -> str:
    """The block of a parameter, or its module."""
    return block(name) if element(block(name)) else name.rpartition(".")[0]


def reductions(flow: Flow, split: Mapping[str, Features]) -> Reductions:
    """A run's: what is added to other sums, and needed without them too, is reduced before it is added. A sum that meets computed
    factors alone is reduced before these, whose gradients are complete then."""
    found = Reductions(flow, split)
    both = found.merged & {root for _, root in found.reduced}
    alone = found.scaled - found.merged
    tried = [Reductions(flow, split, early) for early in (both, alone, both | alone) if early]
    return min([found, *tried], key=lambda one: (one.count, len(one.scaled)))


class Reductions:
    """Walks an unsharded run.

    Args:
        flow: the run.
        split: see `split_features`.
        early: sums that are reduced at once.
    """

    def __init__(self, flow: Flow, split: Mapping[str, Features], early: Collection[int] = ()):
        self.flow, self.split, self.early = flow, split, early
        self.merged: set[int] = set()  # sums that others were added to
        self.scaled: set[int] = set()  # sums that were multiplied by computed factors
        self.kinds: dict[int, Kind] = {}
        self.roots: dict[int, int] = {}  # a value -> the sum in it
        self.reduced: list[tuple[int, int]] = []  # the values that are summed, each with the sum in it
        self.effects: dict[int, Effect] = {}
        for event in flow.run.events:
            if event.kind == "op":
                self._step(event)
            elif (
                event.kind == "leave" and split.get(event.module) == "expert"
            ):  # what each rank's experts make is added up
                for number in event.inputs:
                    if self._kind(number) == "split":
                        self.effects[number] = "sum"
                        self._begin(number)

    @property
    def count(self) -> int:
        """How many sums are needed."""
        return len(self.reduced)

    @property
    def tables(self) -> int:
        """1 where the first sum is of a table that is split by rows."""
        return int(any(self.split.get(name) == "rows" and not element(block(name)) for name in self._ran))

    @property
    def heads(self) -> int:
        """The number of matrices outside the blocks that are split by their output features."""
        return sum(map(self.is_head, self._ran))

    def is_head(self, name: str) -> bool:
        """Whether a matrix outside the blocks is split by its output features."""
        return self.split.get(name) == "out" and not element(block(name))

    @cached_property
    def _ran(self) -> frozenset[str]:
        return frozenset(product.name for product in self.flow.products.values())

    @cached_property
    def whole(self) -> tuple[str, ...]:
        """Parameters that were read and are not split."""
        return tuple(name for name in self.flow.run.parameters.values() if not self._is_split(name))

    @cached_property
    def partial(self) -> tuple[str, ...]:
        """Those of them that meet what is split or a partial sum before the next split part begins."""
        numbers = {name: number for number, name in self.flow.run.parameters.items()}
        return tuple(name for name in self.whole if self._meets_split(numbers[name]))

    def is_read_split(self, name: str) -> bool:
        """Whether a parameter is read where the sequence is split: after the first sum (it may be before the blocks), or in the blocks."""
        numbers = {name: number for number, name in self.flow.run.parameters.items()}
        events = [event for event in self.flow.run.events if event.kind == "op"]
        sums = {number for number, _ in self.reduced}
        first = next(
            i for i, event in enumerate(events) if element(block(event.module)) or sums.intersection(event.inputs)
        )
        return any(numbers[name] in event.inputs for event in events[first:])

    def home(self, name: str) -> str | None:
        """Where the gradient of a whole parameter is reduced; None of one that is split, or added after the sum."""
        return None if self._is_split(name) else _home(name)

    def _meets_split(self, parameter: int) -> bool:
        seen, queue = {parameter}, [parameter]
        for number in queue:
            if number != parameter and self._is_door(number):
                continue
            for event in self.flow.readers.get(number, ()):
                others = [self.kinds.get(self.roots.get(n, n)) for n in event.inputs if n != number]
                added = event.name in LINEAR  # its gradient is the sum's, which is complete
                if "split" in others or ("sum" in others and not added):
                    return True
                whole = [n for n in event.outputs if self.kinds.get(n, "whole") == "whole" and n not in seen]
                seen.update(whole)
                queue += whole
        return False

    def _is_door(self, number: int) -> bool:
        """Whether a split part begins at a value, or at a view of it."""
        queue = [number]
        for one in queue:
            for event in self.flow.readers.get(one, ()):
                if self._features(event) == "out":
                    return True
                if event.name in LINEAR and sum(self.flow.run.requires_grad[n] for n in event.inputs) == 1:
                    queue += (n for n in event.outputs if n > one)
        return False

    def _is_split(self, name: str) -> bool:
        return name in self.split or name.rpartition(".")[0] in self.split

    def _kind(self, number: int) -> Kind:
        return self.kinds.get(self.roots.get(number, number), "whole")

    def _features(self, event: Event) -> Features | None:
        fresh = (n for n in event.outputs if n not in event.inputs)
        made = next((self.flow.products[n] for n in fresh if n in self.flow.products), None)
        found = None if made is None else self.split.get(made.name) or self.split.get(f"{made.name}.weight")
        if found is not None and made.turned:  # stored [in, out]: styles of single parameters mean the last two dims
            found = {"out": "in", "in": "out"}.get(found, found)
        return found or ("out" if any(name in self.split for name in self._parameters(event)) else None)

    def _parameters(self, event: Event) -> Iterator[str]:
        return (self.flow.run.parameters[n] for n in event.inputs if n in self.flow.run.parameters)

    def _step(self, event: Event) -> None:
        features = self._features(event)
        given = [self._kind(n) for n in event.inputs]
        if features == "rows" or (features == "in" and "split" in given):
            self._reduce(event)  # a slice of a sum's features is no sum of slices
            self._give(event, "sum")
        elif features is not None or "split" in given:
            self._reduce(event)
            self._give(event, "split")
            self._note(event, self._effect(event, features))
        elif "sum" in given:
            if event.name in LINEAR or (event.name in SCALING and given.count("sum") == 1):
                if event.name in SCALING and any(self._is_computed(n) for n in event.inputs):
                    self.scaled.update(self.roots.get(n, n) for n in event.inputs if self._kind(n) == "sum")
                self._note(event, "scaled" if event.name in SCALING else "residual")
                self._hand_on(event)
            else:
                self._reduce(event)

    def _is_computed(self, number: int) -> bool:
        """Whether a factor of a sum has a gradient, and is no parameter."""
        run = self.flow.run
        return self._kind(number) != "sum" and run.requires_grad[number] and number not in run.parameters

    def _effect(self, event: Event, features: Features | None) -> Effect:
        """Of an operation with a split result; logits are gathered, and what is made of them is whole."""
        if features is not None:
            made = next((self.flow.products[n] for n in event.outputs if n in self.flow.products), None)
            return "gathered" if made is not None and self.is_head(made.name) else "split"
        said = {self.effects.get(n) for n in event.inputs if self._kind(n) == "split"}
        return "logits" if said <= {"gathered", "logits"} else "split"

    def _note(self, event: Event, effect: Effect) -> None:
        self.effects.update((n, effect) for n in event.outputs if n not in event.inputs)

    def _give(self, event: Event, kind: Kind) -> None:
        if kind == "sum":
            self._note(event, "sum")
        for number in event.outputs:
            self._begin(number, kind)

    def _begin(self, number: int, kind: Kind = "sum") -> None:
        self.roots.pop(number, None)
        self.kinds[number] = kind
        if number in self.early:
            self.kinds[number] = "whole"
            self.reduced.append((number, number))

    def _hand_on(self, event: Event) -> None:
        sums = [n for n in event.inputs if self._kind(n) == "sum"]
        for number in (n for n in event.outputs if n not in sums):
            if len(sums) == 1:  # whole once the one sum in it is
                self.roots[number] = self.roots.get(sums[0], sums[0])
            else:
                self._begin(number)
                self.merged.update(self.roots.get(n, n) for n in sums)

    def _reduce(self, event: Event) -> None:
        for number in event.inputs:
            if self._kind(number) == "sum":
                root = self.roots.get(number, number)
                self.kinds[root] = "whole"
                self.reduced.append((number, root))
