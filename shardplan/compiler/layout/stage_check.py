"""Whether a model can be cut into pipeline stages as a plan declares, from its recorded unsharded runs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.core.by_key import by_key
from shardplan.core.stages import HandedOn
from shardplan.core.tree import ModuleTree, parent

from .run import RecordedModel
from .stage_reads import Crossing, Ends, StageParts, StageRun, find_ends


@dataclass(frozen=True, slots=True)
class CutFacts:
    """What the recorded runs show of a cut; all names are those of the model that ran.

    Args:
        parts: the blocks, and everything in the first and the last stage.
        ends: where the parameters are read that are in no block and that the plan does not name.
        crossings: values that a stage reads but does not have, one for each place that reads one.
        order: the order in which the blocks were called, in the first run that calls them out of order; else None.
        apart: blocks that do not read what the block before them returns.
        shared: modules of a block that ran while another block did.
        handed: what carried modules hand on.
        unnamed: carried modules whose output is neither a tensor nor a tuple of tensors.
        written: as `PipelineCut.written`.
        results: as `PipelineCut.results`; None where the blocks return neither a tensor nor a tuple.
        run: the run with the crossings.
    """

    parts: StageParts
    ends: Ends
    crossings: tuple[Crossing, ...] = ()
    order: tuple[int, ...] | None = None
    apart: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    handed: tuple[HandedOn, ...] = ()
    unnamed: tuple[str, ...] = ()
    results: int | None = 0
    written: tuple[str, ...] = ()
    run: StageRun | None = None

    @property
    def proven(self) -> bool:
        """Whether exactly the declared values cross each cut."""
        wrong = (self.crossings, self.order, self.apart, self.shared, self.unnamed, self.ends.inside, self.ends.both)
        return not any(wrong) and self.results is not None and not self.ends.unread

    def suggested_carry(self) -> tuple[str, ...]:
        """Modules to carry so that all crossing values are declared; empty where no module returns one of the values."""
        assert self.run is not None
        found: dict[str, None] = {}
        for crossing in self.crossings:
            for root in crossing.roots:
                module = self.run.returning.get(root)
                if module is None or module in self.parts.carried:
                    return ()
                found[module] = None
        return tuple(found)


def cut_facts(recorded_models: Sequence[RecordedModel], parts: StageParts) -> CutFacts:
    """Look at a cut of a model.

    Args:
        recorded_models: the model, with each kind of input that it takes.
        parts: the blocks, and what a plan names in the first and last stage or carries.
    """
    tree = recorded_models[0].tree
    bare = [StageRun(recorded.reference, tree, parts) for recorded in recorded_models]
    ends = find_ends(bare)
    order = next((run.calls() for run in bare if run.calls() != tuple(range(len(parts.blocks)))), None)
    whole = replace(parts, first=(*parts.first, *ends.first), last=(*parts.last, *ends.last))
    facts = CutFacts(whole, ends)
    if order is not None:
        return replace(facts, order=order)
    lengths = dict(ChainMap(*(recorded.reference.returned for recorded in recorded_models)))
    of_blocks = {lengths.get(name) for name in parts.blocks}
    crossings: dict[tuple[int, str], Crossing] = {}
    apart, shared, written, used = set[str](), set[str](), set[str](), set[tuple[str, str]]()
    results: dict[str, set[str]] = {name: set() for name in parts.carried}
    first_run = None
    for run in (StageRun(recorded.reference, tree, whole) for recorded in recorded_models):
        shared.update(_shared(run))
        written |= run.written()
        for name, position in run.carried_results():
            results[name].add(position)
        for cut in range(len(parts.blocks)):
            for last in (False, True):
                reads = run.reads_of(cut, last=last)
                if reads.missing and first_run is None:
                    first_run = run
                if run is first_run:
                    for one in reads.missing.values():
                        crossings.setdefault((one.value, one.result), one)
                used |= reads.used
                if not reads.connected:
                    apart.add(parts.blocks[cut])
    # A hook may read results that no code was seen to read in any layer: a flag of the call turns it on.
    read = {tree.pattern(module) for module, _ in used}
    idle = frozenset(name for name in parts.carried if tree.pattern(name) not in read)
    used |= {(name, position) for name in idle for position in results[name]}
    handed, unnamed = _handed(parts.carried, used, lengths, idle)
    return replace(
        facts,
        crossings=tuple(crossings.values()),
        apart=tuple(name for name in parts.blocks if name in apart),
        shared=tuple(sorted(shared)),
        handed=handed,
        unnamed=unnamed,
        written=tuple(name for name in whole.first if name in written),
        results=next(iter(of_blocks)) if len(of_blocks) == 1 else None,
        run=first_run,
    )


def _shared(run: StageRun) -> Iterable[str]:
    """Modules of a block that ran during another block."""
    for event, active in zip(run.trace.events, run.active, strict=True):
        if event.kind == "enter" and active is not None:
            home = run.parts.blocks[active]
            others = (one for one in run.parts.blocks if one != home and f"{event.module}.".startswith(f"{one}."))
            if not f"{event.module}.".startswith(f"{home}.") and next(others, None) is not None:
                yield event.module


def _handed(
    carried: Iterable[str], used: set[tuple[str, str]], lengths: Mapping[str, int | None], idle: frozenset[str]
) -> tuple[tuple[HandedOn, ...], tuple[str, ...]]:
    found, unnamed = [], []
    for name in carried:
        positions = sorted(position for module, position in used if module == name)
        length = lengths.get(name)
        if not positions:
            continue
        if length is None or not all(position.isdecimal() for position in positions):
            unnamed += [name] if name not in idle else []
        else:
            found.append(HandedOn(name, tuple(map(int, positions)), length, unread=name in idle))
    return tuple(found), tuple(unnamed)


def derived_parts(recorded_models: Sequence[RecordedModel], blocks: tuple[str, ...]) -> tuple[StageParts, CutFacts]:
    """The least that a plan must declare of a cut, and the facts about that cut.

    Args:
        blocks: the blocks of the model that the recorded_models ran.
    """
    parts, tree = StageParts(blocks), recorded_models[0].tree
    facts = cut_facts(recorded_models, parts)
    while facts.crossings and (more := facts.suggested_carry()):
        patterns = {tree.pattern(name) for name in more}
        alike = (name for name in tree.modules if tree.pattern(name) in patterns)  # layers that hand it on do so too
        parts = replace(parts, carried=tuple(dict.fromkeys((*parts.carried, *alike))))
        facts = cut_facts(recorded_models, parts)
    return parts, facts


def blocks_of(tree: ModuleTree) -> tuple[str, ...]:
    """The elements of the list of modules with the most parameters, among lists that are in no other list."""
    from shardplan.model.repeated_blocks import repeated_blocks

    def size(blocks: Iterable[str]) -> int:
        below = tuple(f"{block}." for block in blocks)
        return sum(parameter.numel for name, (_, parameter) in tree.parameters.items() if name.startswith(below))

    lists = by_key((parent(block), block) for block in repeated_blocks(tree))
    return tuple(max(lists.values(), key=size, default=()))
