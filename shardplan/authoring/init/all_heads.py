"""Biases, masks and decays of all heads that a module is given, or keeps as buffers: each rank reads its share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardplan.core.tree import ModuleTree, is_count

from .draft import Draft, Options
from .flow import Flow

KNOWN = ("num_attention_heads", "num_key_value_heads")  # the likeliest names for a number of heads


def reading_shares(flow: Flow, draft: Draft, module: str, tp: int, tree: ModuleTree) -> Iterator[Draft]:
    """Drafts in which a module reads its share of all that has a place for each of as many heads as one of its numbers counts.

    Args:
        flow: of the reduced model.
        draft: the numbers that its rule divides come first.
        module: its name.
        tree: the model's own.
    """
    info, pattern = flow.tree.modules[module], flow.tree.pattern(module)
    rule = draft.tensor_parallel.get(pattern, {"style": "replicate"})
    divided = [f for f in map(info.numbers.get, rule.get("divide", ())) if is_count(f)]
    for heads in dict.fromkeys((*divided, *filter(is_count, info.numbers.values()))):
        if heads == 1 or heads % tp:
            continue
        buffers = {name: shape.index(heads) for name, shape in info.buffers.items() if heads in shape}
        given = _arguments(flow, module, heads, tree)
        ways: list[Options] = [{"split_buffers": buffers}] if buffers else []
        ways += [{"split_arguments": {name: dim}} for name, dim in given.items()]
        ways += [{"split_arguments": given, **way} for way in ways[:1] if len(ways) > 1]
        for way in ways:
            if not way.keys() & rule.keys():
                yield draft.with_rules({pattern: {**rule, **way}})


def _arguments(flow: Flow, module: str, heads: int, tree: ModuleTree) -> Options:
    """Its arguments behind the first that have a dim for the heads, or for those of each sequence of the batch, and what says so."""
    called = next((e for e in flow.run.events if e.kind == "enter" and e.module == module), None)
    if called is None:
        return {}
    batch = flow.run.values[called.inputs[0]].shape[0]
    found: dict[str, Any] = {}
    for name, number in list(zip(called.names, called.inputs, strict=True))[1:]:
        value = flow.run.values[number]
        shape = tuple(value.shape) if value.is_floating_point() or value.dtype == torch.bool else ()
        if heads in shape:
            found[name] = shape.index(heads)
        elif batch * heads in shape and (words := _words(heads, flow.tree, tree)) is not None:
            found[name] = {"dim": shape.index(batch * heads), "heads": words}
    return found


def _words(heads: int, reduced: ModuleTree, tree: ModuleTree) -> str | None:
    """A number of the configuration that says how many heads there are; of a model without configuration, how many."""
    if not tree.numbers:
        return str(heads)
    names = (name for name in (*KNOWN, *reduced.numbers) if name in reduced.numbers and name in tree.numbers)
    return next((name for name in names if reduced.numbers[name] == heads), None)
