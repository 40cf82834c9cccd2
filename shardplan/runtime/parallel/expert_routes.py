"""The ways to send tokens to their experts and back: once for each expert, or once for each rank that has some of the token's experts.

Both sort on the device, and wait for it once: for the numbers of rows to exchange. A checkpoint's second run does not wait (`read_once`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardplan.core.module_program import Exchange
from shardplan.torchlib.private import private

from .expert_exchange import ExchangeBackend, Route, exchange, swap
from .expert_rows import OwnRows, add_up, sum_of_own, take
from .expert_turns import Turn
from .read_once import once

FakeTensor = private("FakeTensor")
# For tensors without values: how many (token, expert) pairs this rank gets, relative to the mean over ranks.
LOAD: ContextVar[float] = ContextVar("LOAD", default=1.0)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that have the experts, in the order of the experts.

    Args:
        group: these ranks.
        own: this rank's index.
        backend: exchanges rows between them.
        turn: the module of experts that exchanges them.
    """

    group: ProcessGroup
    own: int
    backend: ExchangeBackend
    turn: Turn

    def route(self, sent: list[int], received: list[int]) -> Route:
        return Route(tuple(sent), tuple(received), self.group, self.backend)

    def tell(self, *counts: Tensor) -> Tensor:
        """Send each rank this rank's counts for it (rows of [n, ...]) and the number of this rank's module; receive theirs."""
        return swap(torch.cat([*counts, counts[0].new_full((counts[0].shape[0], 1), self.turn.number)], 1), self.group)

    def say_absent(self, columns: int, device: torch.device) -> None:
        """Take part in `tell`, with the same number of columns, without a call of the module.

        Raises:
            RuntimeError: another rank calls it.
        """
        absent = torch.full((self.group.size(), columns + 1), self.turn.absent, dtype=torch.int64, device=device)
        self.turn.compare(numbers_of(swap(absent, self.group)[:, -1], lambda: [self.turn.absent]))


def every_pair(run: OwnRows, ranks: Ranks, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Send a token once for each of its experts. The results come back, and are weighted here.

    Args:
        run: the module's forward.
        ranks: of the experts.
        tokens: this rank's, [T, H].
        ids: [T, k].
        weights: [T, k].

    Raises:
        ValueError: an id that no expert has.
        RuntimeError: a rank does not call this module.
    """
    n, width = ranks.group.size(), ids.shape[1]
    by_expert, slots = ids.reshape(-1).sort(stable=True)
    first = torch.searchsorted(by_expert, torch.arange(run.count + 1, device=ids.device, dtype=ids.dtype))
    unknown = first[0] + (by_expert.shape[0] - first[-1])
    counts = first.diff().view(n, run.local)
    theirs = ranks.tell(counts, unknown.expand(n, 1))
    sent, received, unknowns, turns = numbers_of(
        torch.stack([counts.sum(1), theirs[:, : run.local].sum(1), theirs[:, -2], theirs[:, -1]]),
        lambda: [*expected(ranks, ids.numel(), ids.numel()), [0] * n, [ranks.turn.number] * n],
    )
    ranks.turn.compare(turns)
    refuse_unknown(run, sum(unknowns))
    route = ranks.route(sent, received)

    (rows,) = exchange(route, take(tokens, slots, width))
    experts = torch.arange(run.local, device=ids.device).repeat(n)
    experts = experts.repeat_interleave(theirs[:, : run.local].reshape(-1), output_size=sum(received))
    (back,) = exchange(route.back, run(rows, experts, weights.new_ones(rows.shape[0])))
    back = back * take(weights.reshape(-1), slots, 1).unsqueeze(1)
    return add_up(back, slots, tokens.shape[0], width).to(tokens.dtype)


def once_a_rank(run: OwnRows, ranks: Ranks, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Send a token once to each rank that has some of its experts, with its ids and weights. The results come back weighted
    and summed. Arguments and errors: see `every_pair`."""
    n = ranks.group.size()
    owners = ids.div(run.local, rounding_mode="floor").unsqueeze(-1) == torch.arange(n, device=ids.device)  # [T, k, n]
    goes = owners.any(1)  # [T, n]
    width = min(ids.shape[1], n)  # a token goes to at most this many ranks, and has a slot for each
    first = torch.arange(tokens.shape[0], device=ids.device).unsqueeze(1) * width
    slots = (first + goes.cumsum(1) - 1).T.reshape(-1)  # by rank, then by token
    unknown = ((ids < 0) | (ids >= run.count)).sum()
    counts = torch.stack([goes.sum(0), owners.sum((0, 1)), unknown.expand(n)], 1)
    theirs = ranks.tell(counts)

    def estimated() -> list[list[int]]:
        even = round(tokens.shape[0] * ranks_of_a_token(run.count, n, ids.shape[1]) / n)
        own_pairs = [round(ids.numel() // n * LOAD.get())] * n
        return [*expected(ranks, n * even, tokens.shape[0]), own_pairs, [0] * n, [ranks.turn.number] * n]

    sent, received, pairs, unknowns, turns = numbers_of(torch.cat([counts[:, :1], theirs], 1).T, estimated)
    ranks.turn.compare(turns)
    refuse_unknown(run, sum(unknowns))
    route = ranks.route(sent, received)

    chosen = (~goes).T.reshape(-1).to(torch.uint8).argsort(stable=True)[: sum(sent)]
    slots = slots[chosen]
    rows, their_weights = exchange(route, take(tokens, slots, width), take(weights, slots, width))
    their_ids = route.exchange(take(ids, slots, width).to(torch.int32)) - ranks.own * run.local
    (back,) = exchange(route.back, sum_of_own(run, rows, their_ids, their_weights, sum(pairs)))
    return add_up(back, slots, tokens.shape[0], width)


def columns(exchange: Exchange, local: int) -> int:
    """How many counts a rank sends to each rank, if each rank has `local` experts."""
    return local + 1 if exchange == "pairs" else 3


def own_part(run: OwnRows, own: int, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The contribution of this rank's experts to tokens that all ranks have: a partial sum. `own`: this rank's index.
    Other arguments and errors: see `every_pair`."""
    ids = ids - own * run.local
    mine = ((ids >= 0) & (ids < run.local)).sum()
    first = -own * run.local
    unknown = ((ids < first) | (ids >= first + run.count)).sum()
    pairs, unknowns = numbers_of(
        torch.stack([mine, unknown]), lambda: [round(ids.numel() * run.local // run.count * LOAD.get()), 0]
    )
    refuse_unknown(run, unknowns)
    return sum_of_own(run, tokens, ids, weights, pairs)


def numbers_of(counted: Tensor, estimated: Callable[[], list[Any]]) -> list[Any]:
    """Read the numbers in a tensor, which waits for the device.

    Args:
        estimated: gives the same number of values, for a tensor without values.
    """
    return once(lambda: estimated() if isinstance(counted, FakeTensor) else counted.tolist())


def expected(ranks: Ranks, total: int, most: int) -> tuple[list[int], list[int]]:
    """An estimate of the numbers of rows that this rank sends to each rank, and receives from each. Its own experts get `LOAD`
    times the mean; all other experts get equal numbers.

    Args:
        total: the rows that a rank sends, if all experts get equally many.
        most: the most rows that a rank can have for another.
    """
    n = ranks.group.size()
    own = round(total * LOAD.get() / n)
    share, over = divmod(total - own, max(1, n - 1))
    sent = [share + (i < over) for i in range(n - 1)]
    sent.insert(ranks.own, min(own, most))
    return sent, [min(own, most)] * n


def ranks_of_a_token(experts: int, ranks: int, chosen: int) -> float:
    """The expected number of ranks that have some of a token's experts, if it chooses uniformly among all experts: ranks
    times the probability that a rank has one, 1 - C(E - E/n, k) / C(E, k)."""
    return ranks * (1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen))


def refuse_unknown(run: OwnRows, number: int) -> None:
    """Refuse ids without an expert; call it on all ranks with their number over all ranks.

    Raises:
        ValueError: the number is not 0.
    """
    if number:
        raise ValueError(
            f"{run.call.module} was called with {number} expert ids outside of 0 to {run.count - 1}, the experts of its plan"
        )
