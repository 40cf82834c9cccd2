"""Comparing a user's step on ranks with one process on the same global batch: the first value that differs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isclose

import torch

from shardplan.torchlib.equality import relative_error

from .step_causes import (
    LIMIT,
    Alone,
    Difference,
    after_backward,
    at_the_optimizer,
    cut_into_micro_batches,
    of_loss,
    of_parameters,
    of_rates,
    of_updates,
    off,
    worst,
)
from .step_kept import apart, in_words, of_kept
from .step_watch import Ran


def in_one_process(alone: Alone, micro: int) -> list[Difference]:
    """The step's errors on one process.

    Args:
        micro: the number of its micro-batches.
    """
    first, found = alone.same[0], []
    line = first.lines.get("backward")
    if first.offsets.get(2, 0) > 2 * max(first.offsets.get(1, 0), first.offsets.get(0, 0)):
        text = "the loss of a token is that of the token two places after it: labels are shifted twice"
        found.append(
            Difference(
                text, "a transformers model shifts the labels that it is given: pass them as the input ids are", line
            )
        )
    if first.forwards and first.reached < first.forwards and first.reached < micro <= first.forwards:
        text = f"backward reaches {first.reached} of the model's {first.forwards} forwards in a step"
        found.append(Difference(text, "call backward for the loss of each micro-batch", line))
    if first.updates and not any(x.any() for x in first.update.values()):
        found.append(Difference("optimizers step without a gradient", "reduce gradients in the last micro-batch", line))
    if first.zeroed and not alone.parts:
        found.append(Difference(ZEROED, "zero gradients once a step, after the optimizer's", line))
    if found:
        return found
    for part, joined in zip(alone.parts, alone.joined, strict=True):
        if (wrong := worst(part.update or part.backward, joined.update or joined.backward)) is not None:
            if worst(part.backward, joined.backward) is not None:
                if part.zeroed:
                    return [Difference(ZEROED, "zero gradients once a step, after the optimizer's", line)]
                return [cut_into_micro_batches(part, joined, alone.pieces)]
            text = (
                f"the gradient of {wrong[0]} is right after backward, but at the optimizer's step it is {wrong[1]:.1e} off the one "
                "of the same rows in one batch"
            )
            if part.factor and joined.factor:
                text += f": it is scaled by {part.factor:.4g}, in one batch by {joined.factor:.4g}"
            help = "clip and scale gradients once, after the last micro-batch, by numbers that no single micro-batch decides"
            return [Difference(text, help, part.lines.get("update"))]
        if (
            part.loss is not None
            and joined.loss is not None
            and not isclose(part.loss, joined.loss, rel_tol=LIMIT, abs_tol=LIMIT)
        ):
            text = f"the loss that the step returns depends on how its batch is cut: {part.loss:.6g}, and {joined.loss:.6g} of the same rows in one batch"
            return [Difference(text, "return a sum over tokens, divided by the tokens of all micro-batches", None)]
    return []


ZEROED = "gradients of a micro-batch are zeroed before the next one's are added"
ALIKE = "random numbers for a whole value must be the same on all tp ranks: seed them alike"


def on_ranks(alone: Alone, ranks: Sequence[Sequence[Ran]], experts: frozenset[str]) -> Difference | None:
    """The first value of the ranks that differs from one process.

    Args:
        ranks: rank -> the results of each step.
        experts: the parameters that are distributed over ep.
    """
    before: dict[str, str] = {}
    for step, one in enumerate(alone.same, 1):
        now = [run[step - 1] for run in ranks]
        for compared in (of_updates, partial(_of_step, alone=alone if step == 1 else None, experts=experts)):
            for rank, own in enumerate(now):
                if (found := compared(own, one, now)) is not None:
                    said = f"step {step}, rank {rank}: {found.message}"
                    if before and found.help is None:
                        said += f"; after step {step - 1} {' and '.join(before)} differed on ranks from one process"
                        return Difference(said, f"compute {next(iter(before))} from what all ranks have", found.line)
                    return Difference(said, found.help, found.line)
        before = {name: why for name, why in apart(one, now).items() if why == "a rank's own"}
    return None


def not_compared(alone: Alone, ranks: Sequence[Sequence[Ran]]) -> tuple[str, ...]:
    """The values that the script keeps and that are not compared with one process."""
    found: dict[str, str] = {}
    for step, one in enumerate(alone.same):
        found |= apart(one, [run[step] for run in ranks])
    return in_words(found)


def among_ranks(ranks: Sequence[Sequence[Ran]], tp: int) -> Difference | None:
    """The first loss that differs within a tp group, or the first parameter that differs between ranks, which then drew different numbers
    for a whole value."""
    for rank, run in enumerate(ranks):
        for step, (own, first, whole) in enumerate(zip(run, ranks[rank // tp * tp], ranks[0], strict=True), 1):
            if not all(isclose(a, b, rel_tol=LIMIT) for a, b in zip(own.roots, first.roots, strict=False)):
                text = f"step {step}, rank {rank}: its loss is {own.roots[0]:.6g}, that of rank {rank // tp * tp}, of the same tp group, {first.roots[0]:.6g}"
                return Difference(text, ALIKE, own.lines.get("backward"))
            first = whole
            if (wrong := worst(own.after, first.after)) is not None:
                text = f"step {step}, rank {rank}: {wrong[0]} is {wrong[1]:.1e} off rank 0's after the optimizer's step"
                return Difference(text, ALIKE, own.lines.get("backward"))
    return None


def _of_step(
    own: Ran, one: Ran, ranks: Sequence[Ran], *, alone: Alone | None, experts: frozenset[str]
) -> Difference | None:
    if off(own.backward, one.backward):
        return after_backward(own, one, alone, ranks)
    if off(own.update, one.update):
        return at_the_optimizer(own, one, ranks, experts)
    if (found := of_rates(own, one)) is not None:
        return found
    if off(own.after, one.after):
        return of_parameters(own, one)
    if (found := of_kept(own, one, ranks)) is not None:
        return found
    for name in {**one.buffers, **own.buffers}:
        written, right = own.buffers.get(name), one.buffers.get(name)
        if written is None or right is None or not relative_error(written, right) <= LIMIT:
            every = [run.buffers.get(name) for run in ranks]
            alike = all(x is not None and written is not None and torch.equal(x, written) for x in every)
            help = "compute what is written from the batches of all data-parallel ranks: reduce it over them"
            text = f"the step writes another value into the buffer {name} than on one process"
            return Difference(text if alike else f"{text}, each rank its own", None if alike else help)
    return of_loss(own, one, ranks)
