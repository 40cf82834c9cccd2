"""A model with the plan that a hand writes for it, and what a plan splits of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from textwrap import dedent
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from shardplan.compiler.bind import bind
from shardplan.compiler.lower import split_parameters
from shardplan.core.mesh import MeshSizes
from shardplan.core.tree import block, element
from shardplan.language import parse_plan
from shardplan.model.build_tree import tree_of
from tests.own_structures import Tokens, block_of, ids

TP = 2
GATHERED = ("colwise_gather_output", "rowwise_split_input", "embedding_colwise")
MLP = "mlp: input_with_grad_allreduce\nmlp.up: colwise\nmlp.down: rowwise\n"
OUTSIDE = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}


@dataclass(frozen=True)
class Own:
    """A model of one's own.

    Args:
        build: makes it.
        rules: `tensor_parallel` of the plan by hand.
        inputs: the arguments of a call, from a seed.
        lacks: what `init` does not find: the code of its finding, and words of it. Empty where it finds all that the hand does.
    """

    build: Callable[[], nn.Module]
    rules: Mapping[str, Any]
    inputs: Callable[[int], dict[str, Tensor]] = ids
    lacks: tuple[str, ...] = ()

    def made(self) -> nn.Module:
        """The model, with the same weights each time."""
        torch.manual_seed(0)
        return self.build()

    @property
    def by_hand(self) -> dict[str, Any]:
        """The plan by hand as a document."""
        return {"version": "1", "name": "by-hand", "tensor_parallel": dict(self.rules)}


def own(
    build: Callable[[], nn.Module],
    rules: str,
    inputs: Callable[[int], dict[str, Tensor]] = ids,
    lacks: tuple[str, ...] = (),
) -> Own:
    """A model with rules as YAML."""
    return Own(build, read(rules), inputs, lacks)


def decoder(block: Callable[[], nn.Module], *rules: str, lacks: tuple[str, ...] = ()) -> Own:
    """Blocks between an embedding and a head.

    Args:
        rules: of what is below the block; "" is the block itself.
    """
    below = {f"blocks.*.{name}".rstrip("."): rule for text in rules for name, rule in read(text).items()}
    return Own(partial(Tokens, block), {**OUTSIDE, **below}, ids, lacks)


def attention(part: Callable[[], nn.Module], rules: str, lacks: tuple[str, ...] = ()) -> Own:
    """Blocks with an attention of their own, `attention`, and the MLP that all have."""
    return decoder(block_of(part), rules, MLP, lacks=lacks)


def read(rules: str) -> dict[str, Any]:
    """Rules, as YAML."""
    return yaml.safe_load(dedent(rules))


class Split(NamedTuple):
    """Shares (0 to 1) of a model's parameters.

    Attributes:
        stored: those that are stored in parts, one on each rank.
        through: those of them whose results inside a block are not gathered at once: the work is split too.
    """

    stored: float
    through: float


def split(model: nn.Module, document: Mapping[str, Any]) -> Split:
    """What a plan splits of a model."""
    plan = parse_plan(document, name="own").plan
    assert plan is not None
    tree = tree_of(model)
    bound, _ = bind(plan, tree, MeshSizes(tp=TP))
    stored = split_parameters(bound)
    gathered = {
        name
        for name in stored
        if element(block(tree.parameters[name][0].name))
        and (assigned := bound.assignments.get(tree.parameters[name][0].name)) is not None
        and assigned.rule.style in GATHERED
    }
    # A tied parameter counts once.
    count = {name: one.numel for name, (_, one) in tree.parameters.items() if not _again(name, tree.tied)}
    everything = sum(count.values())
    kept, through = (sum(count[name] for name in count if name in names) for names in (stored, stored - gathered))
    return Split(kept / everything, through / everything)


def _again(name: str, tied: Any) -> bool:
    return any(name in group and name != next(iter(group)) for group in tied)


@dataclass(frozen=True)
class Found:
    """What is found out about a model.

    Args:
        hand: what the plan by hand splits; its error where it is not proven.
        init: what `init` splits; its error likewise.
        said: what `init` says: code and message, reason and help in one line each.
    """

    name: str
    hand: Split | str
    init: Split | str
    said: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Whether `init` splits 95 % of what the hand splits, as stored and in the work."""
        if isinstance(self.hand, str) or isinstance(self.init, str):
            return False
        return all(found >= 0.95 * wanted for found, wanted in zip(self.init, self.hand, strict=True))
