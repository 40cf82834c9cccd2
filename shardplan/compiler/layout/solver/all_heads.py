"""Biases, masks and decays for all heads that a module gets as arguments, or keeps as buffers: each rank reads its share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardplan.core.tree import ModuleTree, is_count
from shardplan.model.reduced.trace import Event

from .draft import Draft, divided, sharing
from .flow import Flow

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
