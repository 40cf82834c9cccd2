"""Distributed experts on real ranks, against the whole module: results, every gradient, two runs, and the bytes that are sent.

A rank that does not take part in an exchange makes the others hang, which the limit on the time of a call reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
from expert_modules import EXPERTS, HIDDEN, KINDS, Call, a_call, distribute_experts, experts_module
from processes import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shardplan.core.layout import I, P, R
from shardplan.core.module_program import Exchange
from shardplan.proof.compare import TOLERANCE, magnitude, relative_error
from shardplan.runtime.parallel import collectives, expert_routes
from shardplan.runtime.parallel.collectives import all_gather
from shardplan.runtime.parallel.tensor_moves import move
from shardplan.torchlib.operators import FUNCTIONAL


@dataclass(frozen=True)
class Case:
    """A module on dp * tp ranks.

    Args:
        exchange: None: every tp rank has its share of the experts; else each of `ep` neighbouring ranks.
        tokens: by dp rank: all its tp ranks have the same, which an exchange slices. Or by rank.
        routes: those of `a_call`.
        frozen: the names of what is not trained: "tokens", "weights", parameters.
    """

    kind: str
    exchange: Exchange | None
    tokens: tuple[int, ...]
    tp: int = 1
    ep: int = 1
    implementation: str = "eager"
    routes: str = "any"
    frozen: tuple[str, ...] = ()
    checkpointed: bool = False
    fully_sharded: bool = False

    def calls(self) -> list[Call]:
        return [a_call(self.kind, tokens, seed, self.routes) for seed, tokens in enumerate(self.tokens)]

    def trained(self) -> tuple[bool, bool]:
        return "tokens" not in self.frozen, "weights" not in self.frozen

    def own(self) -> int:
        """Which of the calls is this rank's."""
        return dist.get_rank() * len(self.tokens) // dist.get_world_size()

    @property
    def sliced(self) -> bool:
        return len(self.tokens) < dist.get_world_size()


@cache
def meshes(tp: int, ep: int) -> dict[str, DeviceMesh]:
    ranks = torch.arange(dist.get_world_size())
    dense = DeviceMesh("cpu", ranks.view(-1, tp), mesh_dim_names=("dp", "tp"))
    sparse = DeviceMesh("cpu", ranks.view(-1, ep), mesh_dim_names=("ep_shard", "ep"))
    return {"dp": dense["dp"], "tp": dense["tp"], "ep_shard": sparse["ep_shard"], "ep": sparse["ep"]}


@dataclass
class Values:
    result: torch.Tensor
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


def module_of(case: Case) -> torch.nn.Module:
    module = experts_module(case.kind, case.implementation)
    for name, p in module.named_parameters():
        p.requires_grad_(name not in case.frozen)
    return module


def reference(case: Case) -> tuple[list[Values], dict[str, torch.Tensor | None]]:
    """Of each dp rank what the whole module makes of its tokens; the sums of the parameters' gradients."""
    module, values = module_of(case), []
    for call in case.calls():
        call = call.fresh(case.trained())
        result = module(call.tokens, call.ids, call.weights) if len(call.tokens) else call.tokens * call.weights.sum()
        result.backward(call.gradient)
        values.append(Values(result.detach(), {"tokens": call.tokens.grad, "weights": call.weights.grad}))
    return values, {name: p.grad for name, p in module.named_parameters()}


def distributed(case: Case) -> Values:
    """The same on this rank. The gradients of its experts are summed over the ranks that have the same ones."""
    mesh, module = meshes(case.tp, case.ep), module_of(case)
    distribute_experts(module, case.exchange, case.sliced, mesh["tp"], mesh["ep"])
    if case.fully_sharded:
        fully_shard(module, mesh=mesh["ep_shard"])
    call = case.calls()[case.own()].fresh(case.trained())
    tokens, weights = call.tokens, call.weights
    if case.exchange is None:
        tokens, weights = (move(x, mesh["tp"], I, R) for x in (tokens, weights))
    arguments = (tokens, call.ids, weights)
    result = checkpoint(module, *arguments, use_reentrant=False) if case.checkpointed else module(*arguments)
    if case.exchange is None:
        result = move(result, mesh["tp"], P, I)
    result.backward(call.gradient)
    values = Values(result.detach(), {"tokens": call.tokens.grad, "weights": call.weights.grad})
    others = mesh["dp" if case.exchange is None else "ep_shard"]
    for name, p in module.named_parameters():
        gradient = None if p.grad is None else p.grad.to_local().clone()
        if gradient is not None and case.fully_sharded:  # each rank has a part of their mean
            parts = all_gather(gradient, others, 0, EXPERTS // mesh["ep"].size())
            gradient = parts * others.size()
        elif gradient is not None:
            dist.all_reduce(gradient, group=others.get_group())
        values.gradients[name] = gradient
    assert module.num_experts == EXPERTS
    return values


def check(cases: list[Case]) -> int:
    """Both runs of each; how often a rank had no rows."""
    for case in cases:
        first, second = distributed(case), distributed(case)
        whole, parameters = reference(case)
        mesh, own = meshes(case.tp, case.ep), whole[case.own()]
        assert torch.equal(first.result, second.result), case
        assert relative_error(first.result, own.result) <= TOLERANCE[torch.float32], case
        has = mesh["tp" if case.exchange is None else "ep"]
        for name, gradient in parameters.items():
            shard = None if gradient is None else gradient.chunk(has.size())[has.get_local_rank()]
            own.gradients[name] = shard
        assert first.gradients.keys() == own.gradients.keys()
        for name, expected in own.gradients.items():
            value, again = first.gradients[name], second.gradients[name]
            assert (value is None) == (expected is None) == (name in case.frozen), (case, name)
            if value is None or expected is None or again is None:
                continue
            assert torch.equal(value, again), (case, name)
            assert value.shape == expected.shape, (case, name)
            scale = magnitude(parameters.get(name, expected))  # of all experts: one without tokens has zeros
            assert magnitude(value - expected) <= TOLERANCE[torch.float32] * scale, (case, name)
    return len(cases)


IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
STACKS = {kind: tuple(name for name, _ in experts_module(kind).named_parameters()) for kind in ("mixtral", "gpt_oss")}


def on_two() -> list[Case]:
    cases = []
    for i, (kind, exchange) in enumerate(product(KINDS, ("once", "pairs"))):
        implementation = IMPLEMENTATIONS[i % 3]
        cases += [
            Case(kind, exchange, (5, 7), ep=2, implementation=implementation),
            Case(kind, exchange, (5,), tp=2, ep=2, implementation=implementation),
            Case(kind, exchange, (5, 4), tp=2, ep=2, implementation=implementation),
        ]
    cases += [Case(kind, None, (5,), tp=2, implementation=i) for kind, i in product(KINDS, IMPLEMENTATIONS)]
    for exchange, implementation in product(("once", "pairs"), IMPLEMENTATIONS):
        cases += [
            Case("gpt_oss", exchange, (6, 3), ep=2, implementation=implementation, routes="first"),
            Case("gpt_oss", exchange, (0, 3), ep=2, implementation=implementation, routes="few"),
            Case("mixtral", exchange, (1,), tp=2, ep=2, implementation=implementation, routes="first"),
        ]
    cases += [Case("gpt_oss", None, (4,), tp=2, routes="first", implementation=i) for i in IMPLEMENTATIONS]
    return cases


def with_frozen() -> list[Case]:
    cases = []
    for exchange, routes in product((None, "once", "pairs"), ("any", "first")):
        place = {"tokens": (6,), "tp": 2} if exchange is None else {"tokens": (6, 3), "ep": 2}
        stacks = STACKS["gpt_oss"]
        for frozen in (
            stacks,
            ("tokens",),
            ("weights",),
            (*stacks, "tokens"),
            (*stacks, "weights"),
            ("tokens", "weights"),
            stacks[:1],
        ):
            cases.append(Case("gpt_oss", exchange, **place, routes=routes, frozen=frozen))
        cases.append(Case("gpt_oss", exchange, **place, routes=routes, checkpointed=True))
    return cases


def test_two_ranks():
    cases = on_two()
    assert on_ranks(2, check, cases, seconds=60) == [len(cases)] * 2


def test_what_is_frozen_or_checkpointed():
    """No rank waits in backward for one that has no rows."""
    cases = with_frozen()
    assert on_ranks(2, check, cases, seconds=60) == [len(cases)] * 2


class Sent:
    """The bytes that this rank sends to others in all-to-alls of rows, by dtype; and the exchanges of numbers."""

    def __init__(self):
        self.bytes = {torch.float32: 0, torch.int32: 0}
        self.numbers = 0

    def __call__(self, operator, x, *args):
        if operator is not ALL_TO_ALL:
            return RUN(operator, x, *args)
        _, sent, group = args
        if x.dtype == torch.int64:
            self.numbers += 1
        else:
            others = sum(sent) - sent[_resolve_process_group(group).rank()]
            self.bytes[x.dtype] += others * x[:1].numel() * x.element_size() if others else 0
        return RUN(operator, x, *args)


RUN, ALL_TO_ALL = collectives._run, FUNCTIONAL.all_to_all_single.default


def sent_in(case: Case) -> tuple[int, int, int]:
    sent = Sent()
    collectives._run = sent
    try:
        distributed(case)
    finally:
        collectives._run = RUN
    return sent.numbers, sent.bytes[torch.float32], sent.bytes[torch.int32]


def formula(case: Case, ranks: int) -> tuple[int, int]:
    """The bytes of a step on all ranks: floating, ids."""
    k, per_rank = KINDS[case.kind][2], EXPERTS // case.ep
    once = pairs = 0
    for dp, call in enumerate(case.calls()):
        share = ranks // len(case.tokens)  # the ranks over which they are sliced
        chunk = -(-len(call.ids) // share)
        for t, ids in enumerate(call.ids.tolist()):
            rank = dp * share + t // chunk
            others = [i // per_rank for i in ids if i // per_rank != rank % case.ep]
            once, pairs = once + len(set(others)), pairs + len(others)
    tokens, weights = case.trained()
    rows = 3 * HIDDEN + HIDDEN * tokens  # there, back, the gradient of what came back, and that of the tokens
    if case.exchange == "pairs":
        return rows * pairs * 4, 0
    return (rows + k + k * weights) * once * 4, once * k * 4


def check_bytes(case: Case, ranks: int) -> None:
    sent = on_ranks(ranks, sent_in, case)
    assert [numbers for numbers, _, _ in sent] == [1] * ranks
    assert (sum(f for _, f, _ in sent), sum(i for _, _, i in sent)) == formula(case, ranks), case
    assert formula(case, ranks)[0] > 0


@pytest.mark.parametrize("frozen", ["nothing", "tokens", "weights"])
@pytest.mark.parametrize("exchange", ["once", "pairs"])
def test_bytes_on_two_ranks(exchange, frozen):
    check_bytes(Case("qwen3_moe", exchange, (9, 7), ep=2, frozen=(frozen,)), 2)


def on_four() -> list[Case]:
    cases = []
    for kind, exchange, implementation in product(KINDS, ("once", "pairs"), IMPLEMENTATIONS):
        for tokens, tp, ep in (
            ((5, 7, 1, 6), 1, 4),
            ((5, 7, 0, 6), 1, 2),
            ((5, 8), 2, 2),
            ((5, 0, 2, 3), 2, 4),
            ((5, 8), 2, 4),
            ((3,), 4, 4),
            ((2,), 4, 2),
        ):
            cases.append(Case(kind, exchange, tokens, tp, ep, implementation))
    for kind, implementation in product(KINDS, IMPLEMENTATIONS):
        cases += [
            Case(kind, None, (5,), 4, implementation=implementation, routes="first"),
            Case(kind, None, (5, 3), 2, implementation=implementation),
        ]
    for exchange, implementation in product(("once", "pairs"), IMPLEMENTATIONS):
        for kind, routes in product(("mixtral", "gpt_oss"), ("first", "few")):
            cases.append(Case(kind, exchange, (5, 2, 0, 3), 1, 4, implementation, routes))
        cases.append(Case("gpt_oss", exchange, (3,), 4, 4, implementation, "first"))
        cases.append(Case("gpt_oss", exchange, (3, 5), 2, 2, implementation, "first", fully_sharded=True))
        cases.append(Case("gpt_oss", exchange, (3, 5, 1, 4), 1, 2, implementation, "first", fully_sharded=True))
    return cases


@pytest.mark.slow
def test_four_ranks():
    cases = on_four()
    assert on_ranks(4, check, cases, seconds=200) == [len(cases)] * 4
    for exchange in ("once", "pairs"):
        check_bytes(Case("qwen3_moe", exchange, (9, 7, 5, 6), ep=4), 4)
        check_bytes(Case("deepseek_v3", exchange, (9, 5), tp=2, ep=4), 4)
        check_bytes(Case("gpt_oss", exchange, (7,), tp=4, ep=2), 4)


def counted(exchange: Exchange) -> tuple[list, list]:
    """The numbers that this rank's driver counts for a batch of eight rows, six for rank 0, and those that are expected
    of the busiest of two ranks with that load."""
    found = []

    def noted(numbers, estimated):
        found.append((numbers.tolist(), estimated()))
        return numbers.tolist()

    module, group = experts_module("mixtral"), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    ids = torch.tensor([0, 1, 2, 3, 0, 1, EXPERTS - 1, EXPERTS // 2]).unsqueeze(1)
    distribute_experts(module, exchange, False, None, group)
    known, token = expert_routes.numbers_of, expert_routes.LOAD.set(1.5)
    expert_routes.numbers_of = noted
    try:
        module(torch.randn(8, HIDDEN), ids, torch.ones(8, 1))
    finally:
        expert_routes.numbers_of = known
        expert_routes.LOAD.reset(token)
    return found[0]


@pytest.mark.parametrize("exchange", ["once", "pairs"])
def test_what_an_estimate_expects_of_the_busiest_rank_is_what_its_driver_counts(exchange):
    numbers, expected = on_ranks(2, counted, exchange)[0]
    assert numbers == list(map(list, expected))
    assert numbers[:2] == [[6, 2], [6, 6]]
