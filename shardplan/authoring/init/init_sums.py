"""Partial sums that a block adds up: `sum_outputs` at the block lets them be reduced together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardplan.compiler.layout import LayoutReport
from shardplan.compiler.layout.mergeable_sums import in_every_block
from shardplan.compiler.layout.solver.draft import Draft, DraftTrials, Options
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.compiler.layout.solver.lengths import features
from shardplan.core.layout import I, R
from shardplan.core.tree import ModuleTree, block, element, part
from shardplan.styles import STYLES
from shardplan.styles.block_inputs import BLOCK_INPUT


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


# Replacing several block inputs inside a part by one before it, where this reduces less.
def with_merged_block_inputs(trials: DraftTrials, flow: Flow, tree: ModuleTree, draft: Draft) -> Draft:
    """The draft with a block input before each part that reduces the gradients of several values inside, where these are
    wider in total than the part's input. The gradients of whole matrices in between are then partial sums.

    So latent attention keeps its block inputs after the latents, unless something else also reads the hidden state, or
    the latents are wider than it.

    Args:
        flow: the unsharded run.
        tree: the tree of the model itself, for the widths.
    """
    report = trials.report(draft)
    for pattern, moved in ({} if report is None else _moved(trials, tree, draft, report)).items():
        width = _width(trials, flow, tree, pattern)
        if len(moved) < 2 or width is None or sum(moved.values()) <= width:
            continue
        rules = {
            p: o for p, o in draft.tensor_parallel.items() if not STYLES[o["style"]].features.tail or p not in moved
        }
        draft = trials.summed(Draft(rules).with_rules({pattern: {"style": BLOCK_INPUT}})) or draft
    return draft


def _moved(trials: DraftTrials, tree: ModuleTree, draft: Draft, report: LayoutReport) -> dict[str, dict[str, int]]:
    """Parts of blocks without a block input of their own -> the values reduced inside: the matrix that reads it -> its width."""
    found: dict[str, dict[str, int]] = {}
    for name in trials.tree.modules:
        around, pattern = part(name), trials.tree.pattern(name)
        rule = draft.tensor_parallel.get(pattern)
        if rule is None or around in (None, name) or (outer := trials.tree.pattern(around)) in draft.tensor_parallel:
            continue
        style = STYLES[rule["style"]]
        if style.features.tail is not None:
            same = next(one for one in tree.modules if tree.pattern(one) == pattern)
            found.setdefault(outer, {})[pattern] = tree.count_near(same, style.features.tail)
        elif (
            R in style.input_sources
            and report.incoming.get(name) == I
            and (width := _features(tree, pattern)) is not None
        ):
            found.setdefault(outer, {})[pattern] = width
    return found


def _width(trials: DraftTrials, flow: Flow, tree: ModuleTree, pattern: str) -> int | None:
    """The width of a part's input; None where no matrix in the part reads this input."""
    readers = (
        product.name
        for event in flow.entries(pattern)
        for product in flow.products.values()
        if event.inputs[0] in product.inputs and product.name.startswith(f"{event.module}.")
    )
    name = next(readers, None)
    return None if name is None else _features(tree, trials.tree.pattern(name))


def _features(tree: ModuleTree, pattern: str) -> int | None:
    """The input features of a matrix in the model itself."""
    module = next((m for name, m in tree.modules.items() if tree.pattern(name) == pattern), None)
    if module is None:
        return None
    weight = module.parameter("weight")
    return features(module, weight, "in") if weight is not None and len(weight.shape) == 2 else None
