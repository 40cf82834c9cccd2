"""The judge of communication (tests/zoo/minimum.py, block inputs.py) on small modules whose answer is known by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardplan.compiler.bind import bind
from shardplan.compiler.layout import RecordedModel, check_layout
from shardplan.core.mesh import MeshSizes
from shardplan.language import parse_plan
from shardplan.model.build_tree import tree_of
from tests.zoo.block_inputs import Frontier, Size, dominated, joined, least
from tests.zoo.least import least as least_of_a_step
from tests.zoo.minimum import choices, minimum, spent

HIDDEN, INNER = 32, 16
SPLIT = {"layers.*.{a,b}": "colwise", "layers.*.o": "rowwise", "head": "colwise_gather_output"}
HEAD = HIDDEN  # its block input
BLOCK_INPUT = "input_with_grad_allreduce"


class Model(nn.Module):
    """Two blocks between a table and a norm; the table is whole.

    Args:
        block: makes one.
    """

    def __init__(self, block):
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList([block() for _ in range(2)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 12, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float().log_softmax(-1)


class Plain(nn.Module):
    """Two matrices read one norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.a, self.b = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.o = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.o(self.a(y) * self.b(y))


class TwoNorms(Plain):
    """Each matrix reads a norm of its own, of the same value (GPT-NeoX)."""

    def __init__(self):
        super().__init__()
        self.other_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.a(self.norm(x)) * self.b(self.other_norm(x)))


class Latent(nn.Module):
    """Each matrix reads a whole latent value of its own (latent attention).

    Args:
        width: of each.
    """

    def __init__(self, width: int):
        super().__init__()
        self.down_a, self.down_b = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        self.a, self.b = (nn.Linear(width, INNER, bias=False) for _ in range(2))
        self.o = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.a(self.down_a(x)) * self.b(self.down_b(x)))


class Streams(Plain):
    """The sum is scaled by factors that the block computes, into two streams (hyper-connections)."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Linear(HIDDEN, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scaled = self.o(self.a(y) * self.b(y)).unsqueeze(-2) * self.factors(y).unsqueeze(-1)
        return x + scaled.tanh().sum(-2)


class Chained(Plain):
    """Another matrix after the sum."""

    def __init__(self):
        super().__init__()
        self.p = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.p(self.o(self.a(y) * self.b(y)))


class OneKey(Plain):
    """Two heads of 8 numbers, and a key and a value that both read, made by one matrix."""

    def __init__(self):
        super().__init__()
        self.head_dim = 8

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        key, value = self.b(y).unsqueeze(-2).chunk(2, -1)
        return x + self.o((self.a(y).unflatten(-1, (-1, 8)) * key + value).flatten(-2))


class Case:
    """A plan for a model.

    Args:
        block: makes one of its blocks.
        rules: besides those that split.
        own: makes a block of the model whose reduced model this is; None is the same.
        merged: with what the layout check says of readers that share one move.
    """

    def __init__(self, block, rules=None, *, own=None, merged=False):
        torch.manual_seed(0)
        model = Model(block)
        tree = tree_of(model)
        recorded = RecordedModel(model, {"input_ids": torch.arange(8).view(2, 4)}, tree)
        document = {"version": "1", "name": "case", "tensor_parallel": {**SPLIT, **(rules or {})}}
        plan, findings = bind(parse_plan(document).plan, tree, MeshSizes(tp=2))
        report = check_layout(plan, [recorded])
        assert not findings and report.ok, [*findings, *report.diagnostics]
        plan = report.onto(plan) if merged else replace(plan, incoming=report.incoming)
        real = tree if own is None else tree_of(Model(own))
        self.frontier: Frontier = choices(plan, recorded, real)
        self.spent = spent(plan, recorded, real)
        self.minimum = minimum(plan, recorded)
        self.fewest = self.minimum["backward"]["all_reduce"]
        self.least = least_of_a_step(plan, recorded, real, 2)

    @property
    def is_beaten(self) -> bool:
        return dominated(self.frontier, *self.spent)


def test_one_door_for_all_readers_of_a_value() -> None:
    """A block has one; without, each reader reduces, and that is not the minimum."""
    merged, without = Case(Plain, merged=True), Case(Plain)
    assert merged.frontier == without.frontier == {3: Size(2 * HIDDEN + HEAD, 0)}
    assert merged.fewest == 3
    assert merged.spent == (3, Size(2 * HIDDEN + HEAD, 0)) and not merged.is_beaten
    assert without.spent == (5, Size(4 * HIDDEN + HEAD, 0)) and without.is_beaten


def test_one_door_in_front_of_two_norms() -> None:
    """A block input after each is as many collectives as one in front and one for the norms' parameters, of twice the size."""
    case = Case(TwoNorms)
    assert case.frontier == {5: Size(2 * HIDDEN + HEAD, 2 * 4 * HIDDEN)}
    assert case.spent == (5, Size(4 * HIDDEN + HEAD, 0)) and case.is_beaten


AFTER = {"layers.*.down_{a,b}": "replicate"}


@pytest.mark.parametrize(("width", "beaten"), [(8, False), (32, True), (48, True)])
def test_block_inputs_after_latents_are_worth_it_where_these_are_narrow(width: int, beaten: bool) -> None:
    """As many collectives as one in front and one for the matrices in between; less for each token where both latents
    together are narrower than the hidden state."""
    case = Case(lambda: Latent(width), AFTER)
    in_front = (5, Size(2 * HIDDEN + HEAD, 2 * 2 * HIDDEN * width))
    after = (5, Size(2 * 2 * width + HEAD, 0))
    assert case.spent == after
    assert dict([min(in_front, after)]) == case.frontier
    assert case.is_beaten == beaten
    assert dominated(case.frontier, *in_front) != beaten


def test_the_sizes_are_the_models_own() -> None:
    """In the reduced model the latents are narrow, in the model they are not."""
    assert not Case(lambda: Latent(8), AFTER).is_beaten
    case = Case(lambda: Latent(8), AFTER, own=lambda: Latent(64))
    assert case.spent == (5, Size(2 * 2 * 64 + HEAD, 0))
    assert case.is_beaten


def test_a_sum_is_reduced_before_it_is_scaled_where_it_is_wider_afterwards() -> None:
    """Then its factors have complete gradients: the least is that without factors. (The table is whole; logits are half of
    an all-reduce.)"""
    logits = 12 / 2
    plain, streams = Case(Plain, merged=True), Case(Streams, {"layers.*.factors": "replicate"}, merged=True)
    assert plain.least == streams.least == Size(2 * HIDDEN + 2 * HIDDEN + HEAD + logits, 0)


def test_rows_that_ranks_share_are_gathered_once() -> None:
    """Of the key, which both ranks read: an all-gather for each block, and a reduce-scatter of its gradient."""
    rule = {"style": "packed_colwise", "packed": [8, 8], "heads": ["1", "1"], "override": True}
    case = Case(OneKey, {"layers.*.b": rule}, merged=True)
    assert case.minimum == {
        "forward": {"all_gather": 1 + 2, "all_reduce": 2},
        "backward": {"all_reduce": 3, "reduce_scatter": 2},
    }


def test_a_sum_is_reduced_in_front_of_what_splits_it() -> None:
    """A whole value is cut by its features in front of a matrix; a partial sum has to be whole before."""
    case = Case(Chained, {"layers.*.p": "rowwise_split_input"})
    assert case.minimum["forward"] == {"all_gather": 1, "all_reduce": 2 * 2}


def test_choices_that_no_other_is_as_good_as() -> None:
    found = least([(3, Size(5, 0)), (2, Size(9, 0)), (2, Size(7, 1)), (4, Size(5, 0)), (4, Size(5, -1))])
    assert found == {2: Size(7, 1), 3: Size(5, 0), 4: Size(5, -1)}
    assert joined({1: Size(4, 0), 2: Size(1, 0)}, {1: Size(1, 7)}) == {2: Size(5, 7), 3: Size(2, 7)}
    assert not dominated(found, 3, Size(5, 0))
    assert dominated(found, 3, Size(6, 0)) and dominated(found, 5, Size(5, -1))
