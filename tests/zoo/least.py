"""The least that a training step communicates, in elements, from the unsharded run and the list of what is split."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.core.plan import ResolvedPlan
from shardplan.core.tree import ModuleTree, block, element
from shardplan.layout import Workbench
from shardplan.synth.flow import Flow

from .doors import Doors, Size
from .minimum import SHARES, Reductions, split_features
from .sizes import Sizes, tokens


def least(resolved: ResolvedPlan, bench: Workbench, tree: ModuleTree, tp: int) -> Size:
    """Elements, each counted as an all-reduce moves it; with whole logits.

    With the sequence split what is sent for each token is the same (each all-reduce is then a reduce-scatter and an
    all-gather, arXiv 2205.05198), and the gradients of all whole parameters behind the embedding are summed.

    Args:
        resolved, bench: see `minimum`.
        tree: the model's own, for the sizes.
        tp: the number of ranks: logits are padded to a multiple of it.
    """
    flow = Flow(bench.reference, bench.tree)
    run = Reductions(flow, split_features(resolved))
    sizes = Sizes(flow, tree, tokens(bench))
    forward = sum(min(sizes.value(number), sizes.value(root)) for number, root in run.reduced)
    logits = sum(-(-sizes.value(n) // tp) * tp for n, made in flow.products.items() if _is_head(run, made.name))
    backward = min(Doors(flow, run.effects, sizes, run.home).frontier.values())
    step = sum(map(sizes.parameter, _on_shards(run))) if resolved.sequence_parallel else backward.step
    return Size(forward + logits * SHARES["all_gather"] + backward.token, step)


def _is_head(run: Reductions, name: str) -> bool:
    return run.split.get(name) == "out" and not element(block(name))


def _on_shards(run: Reductions) -> Iterator[str]:
    """Whole parameters that meet shards of the sequence, among them what is added to the sum that a split matrix makes."""
    for number, name in run.flow.run.parameters.items():
        module = name.rpartition(".")[0]
        added = run.split.get(module) == "in" and len(run.flow.tree.parameters[name][1].shape) == 1
        learns = run.flow.run.requires_grad[number]
        if learns and (added or name in run.whole) and (element(block(name)) or run.is_behind(name)):
            yield name
