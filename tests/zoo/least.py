"""The least that a training step communicates, in elements, from the unsharded run and the list of what is split."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardplan.compiler.layout import RecordedModel
from shardplan.compiler.layout.solver.flow import Flow
from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree, ancestors, block, element

from .block_inputs import BlockInputs, Effect, Size
from .minimum import SHARES, Reductions, means, reductions, split_features, whole_parts
from .sizes import Sizes, tokens


def least(resolved: ResolvedPlan, recorded: RecordedModel, tree: ModuleTree, tp: int) -> Size:
    """Elements, each counted as an all-reduce moves it; with whole logits.

    With the sequence split what is sent for each token is the same (each all-reduce is then a reduce-scatter and an
    all-gather, arXiv 2205.05198), and the gradients of all whole parameters on shards of it are summed. A part that is whole
    and needs the whole sequence gathers what it reads, and the gradient of what it makes.

    Args:
        resolved, recorded: see `minimum`.
        tree: the model's own, for the sizes.
        tp: the number of ranks: logits are padded to a multiple of it.
    """
    flow = Flow(recorded.reference, recorded.tree)
    run = reductions(flow, split_features(resolved))
    sizes = Sizes(flow, tree, tokens(recorded))
    forward = sum(min(sizes.value(number), sizes.value(root)) for number, root in run.reduced)
    logits = sum(-(-sizes.value(n) // tp) * tp for n, made in flow.products.items() if run.is_head(made.name))
    backward = min(BlockInputs(flow, _effects(run, sizes), sizes, run.home).frontier.values())
    both_ways = 2 * sum(map(sizes.value, means(resolved, recorded.reference)))
    found = Size(forward + logits * SHARES["all_gather"] + both_ways, 0) + backward
    if resolved.sequence_parallel:
        whole = whole_parts(resolved)
        edges = [e.inputs[0] for e in flow.run.events if e.kind in ("enter", "leave") and e.module in whole]
        step = sum(map(sizes.parameter, _on_shards(run, whole)))
        found = Size(found.token + sum(map(sizes.value, edges)) * SHARES["all_gather"], step)
    return found


def _effects(run: Reductions, sizes: Sizes) -> Mapping[int, Effect]:
    """A sum that is reduced before it is scaled wants nothing of its factors: where it is wider afterwards, or as wide."""
    early = {root for number, root in run.reduced if sizes.value(root) <= sizes.value(number)}
    return {
        number: effect
        for number, effect in run.effects.items()
        if effect != "scaled" or run.roots.get(number) not in early
    }


def _on_shards(run: Reductions, whole: Collection[str]) -> Iterator[str]:
    """Whole parameters that meet shards of the sequence, among them what is added to the sum that a split matrix makes."""
    for number, name in run.flow.run.parameters.items():
        module = name.rpartition(".")[0]
        added = run.split.get(module) == "in" and len(run.flow.tree.parameters[name][1].shape) == 1
        learns = run.flow.run.requires_grad[number] and not any(
            above in whole for above in (module, *ancestors(module))
        )
        if learns and (added or name in run.whole) and (element(block(name)) or run.is_read_split(name)):
            yield name
