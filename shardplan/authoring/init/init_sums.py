"""Partial sums that a block adds up: `sum_outputs` at the block lets them be reduced together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.compiler.layout.mergeable_sums import in_every_block
from shardplan.compiler.layout.solver.draft import Draft, DraftTrials, Options
from shardplan.core.tree import block, element


def with_sums(trials: DraftTrials, draft: Draft) -> Draft:
    """The draft with the sums that the layout check finds, where the result passes the check."""
    whole = _declared(trials, draft, overlay=False)
    if not draft.tensor_parallel:
        return draft
    sliced = _declared(trials, draft, overlay=True) if draft.sequence_parallel else whole
    changed = {pattern: sliced.get(pattern, {"sum_outputs": []}) for pattern in {**whole, **sliced}}
    sums = {
        "tensor_parallel": whole,
        "sequence_parallel": {pattern: sums for pattern, sums in changed.items() if sums != whole.get(pattern)},
    }
    more = replace(draft, sums={section: rules for section, rules in sums.items() if rules})
    return more if more.sums and trials.right(more) else draft


def _declared(trials: DraftTrials, draft: Draft, *, overlay: bool) -> Mapping[str, Options]:
    """Block -> its rule's options. Each block has at most one sum, and only one that all blocks of its kind have."""
    report, tree = trials.report(draft, overlay=overlay), trials.tree
    found: dict[str, Options] = {}
    if report is None:
        return found
    for one in report.sums:
        pattern = tree.pattern(block(one.closer))
        blocks = [name for name in tree.modules if element(name) and tree.pattern(name) == pattern]
        only_dropouts = all(tree.modules[name].kind == "dropout" for name in one.through)
        if pattern not in found and in_every_block(report.sums, blocks) and only_dropouts:
            inside = f"{block(one.closer)}."
            found[pattern] = {"sum_outputs": [name.removeprefix(inside) for name in one.members]}
            if one.through:  # with active dropouts, the sums are reduced separately
                found[pattern] = {**found[pattern], "optional": True}
    return found
