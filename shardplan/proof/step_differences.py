"""What a user's step does on ranks, beside what it does on one process with the same global batch: the first value that differs, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, sqrt

import torch
from torch import Tensor

from shardplan.torchlib.equality import TOLERANCE, magnitude, relative_error

from .compare import NEGLIGIBLE
from .step_watch import Ran, Tensors

LIMIT = TOLERANCE[torch.float64]


@dataclass(frozen=True)
class Difference:
    """One finding about a step.

    Args:
        message: what differs, where, and by how much.
        help: what to write.
        line: of the script; None: not known.
    """

    message: str
    help: str
    line: int | None = None


@dataclass(frozen=True)
class Alone:
    """What the script does on one process.

    Args:
        same: with the micro-batches of all ranks, one after the other.
        parts, joined: with micro-batches, which differ in their labels alone where losses of rows depend on other rows, and with one batch of all of
            their rows; none where the step draws random numbers.
        shares: the first step with the micro-batches of each data-parallel rank alone.
    """

    same: Sequence[Ran]
    parts: Sequence[Ran] = ()
    joined: Sequence[Ran] = ()
    shares: Sequence[Ran] = ()


def in_one_process(alone: Alone, micro: int) -> list[Difference]:
    """What is wrong on one process already.

    Args:
        micro: the number of its micro-batches.
    """
    first, found = alone.same[0], []
    line = first.lines.get("backward")
    if first.offsets.get(2, 0) > 2 * max(first.offsets.get(1, 0), first.offsets.get(0, 0)):
        text = "the loss of a token is that of the token two places behind it: labels are shifted twice"
        found.append(
            Difference(
                text, "a transformers model shifts the labels that it is given: pass them as the input ids are", line
            )
        )
    if first.forwards and first.reached < first.forwards and first.reached < micro <= first.forwards:
        text = f"of {first.forwards} forwards of the model in a step, backward reaches {first.reached}"
        found.append(Difference(text, "call backward for the loss of each micro-batch", line))
    if first.updates and not any(x.any() for x in first.update.values()):
        found.append(Difference("optimizers step without a gradient", "reduce gradients in the last micro-batch", line))
    if first.zeroed and not alone.parts:
        found.append(Difference(ZEROED, "zero gradients once a step, after the optimizer's", line))
    if found:
        return found
    for part, joined in zip(alone.parts, alone.joined, strict=True):
        if (worst := _worst(part.update or part.backward, joined.update or joined.backward)) is not None:
            name, error = worst
            if _worst(part.backward, joined.backward) is None:
                text = f"the gradient of {name} at the optimizer's step is {error:.1e} off the one of the same rows in one batch, though it is right after backward"
                return [
                    Difference(
                        text, "clip and scale gradients once, after the last micro-batch", part.lines.get("update")
                    )
                ]
            if part.zeroed:
                return [Difference(ZEROED, "zero gradients once a step, after the optimizer's", line)]
            text = f"the step depends on how its batch is cut into micro-batches: the gradient of {name} is {error:.1e} off the one of the same rows in one batch"
            return [Difference(text, MEAN, part.lines.get("backward"))]
        if (
            part.loss is not None
            and joined.loss is not None
            and not isclose(part.loss, joined.loss, rel_tol=LIMIT, abs_tol=LIMIT)
        ):
            text = f"the loss that the step returns depends on how its batch is cut: {part.loss:.6g}, and {joined.loss:.6g} of the same rows in one batch"
            return [Difference(text, "return a sum over tokens, divided by the tokens of all micro-batches", None)]
    return []


ZEROED = "gradients of a micro-batch are zeroed before the next one's are added"
ALIKE = "what is drawn for a whole value must be the same on all tp ranks: seed them alike"
MEAN = (
    "divide sums by the count of the whole step, not by that of a rank or a micro-batch: `for batch, scale in shardplan.micro_batches(model, "
    "batches): (loss * scale).backward()`"
)


def on_ranks(alone: Alone, ranks: Sequence[Sequence[Ran]], experts: frozenset[str]) -> Difference | None:
    """The first value of the ranks that is not that of one process.

    Args:
        ranks: rank -> what each step left behind.
        experts: the parameters that are distributed over ep.
    """
    for step, one in enumerate(alone.same, 1):
        for rank, run in enumerate(ranks):
            if (found := _of_updates(run[step - 1], one)) is not None:
                return Difference(f"step {step}, rank {rank}: {found.message}", found.help, found.line)
        for rank, run in enumerate(ranks):
            if (
                found := _of_step(run[step - 1], one, alone, [r[step - 1] for r in ranks], experts, first=step == 1)
            ) is not None:
                return Difference(f"step {step}, rank {rank}: {found.message}", found.help, found.line)
    return None


def among_ranks(ranks: Sequence[Sequence[Ran]], tp: int) -> Difference | None:
    """The first loss that the ranks of a tp group, or parameter that all ranks, do not have alike: numbers that they drew for a whole value."""
    for rank, run in enumerate(ranks):
        for step, (own, first, whole) in enumerate(zip(run, ranks[rank // tp * tp], ranks[0], strict=True), 1):
            if not all(isclose(a, b, rel_tol=LIMIT) for a, b in zip(own.roots, first.roots, strict=False)):
                text = f"step {step}, rank {rank}: its loss is {own.roots[0]:.6g}, that of rank {rank // tp * tp}, of the same tp group, {first.roots[0]:.6g}"
                return Difference(text, ALIKE, own.lines.get("backward"))
            first = whole
            if (worst := _worst(own.after, first.after)) is not None:
                text = f"step {step}, rank {rank}: {worst[0]} is {worst[1]:.1e} off rank 0's after the optimizer's step"
                return Difference(text, ALIKE, own.lines.get("backward"))
    return None


def _of_updates(own: Ran, one: Ran) -> Difference | None:
    if own.updates != one.updates:
        text = f"optimizers step {own.updates} times, on one process {one.updates}"
        help = "whether to skip a step must be decided on all ranks together: reduce what it is decided by"
        return Difference(text, help, own.lines.get("update"))
    return None


def _of_step(
    own: Ran, one: Ran, alone: Alone, ranks: Sequence[Ran], experts: frozenset[str], *, first: bool
) -> Difference | None:
    if (worst := _worst(own.backward, one.backward)) is not None:
        text, line = (
            f"the gradient of {worst[0]} is {worst[1]:.1e} off after backward{_why(own, alone if first else None)}",
            own.lines.get("backward"),
        )
        if "reduced" in own.lines:
            return Difference(
                text,
                "the plan reduces gradients over ranks, tp and data-parallel: do not reduce them in the script",
                own.lines["reduced"],
            )
        return Difference(text, MEAN, line)
    if (worst := _worst(own.update, one.update)) is not None:
        text = f"the gradient of {worst[0]} is right after backward, and {worst[1]:.1e} off at the optimizer's step"
        return _of_clipping(text, own, one, ranks, experts)
    both = (
        (rate, one.rates[key]) for key, rate in own.rates.items() if key in one.rates
    )  # a stage has groups of its own
    if other := next(((a, b) for a, b in both if not isclose(a, b, rel_tol=1e-9)), None):
        text = f"the learning rate is {other[0]:.6g}, on one process {other[1]:.6g}"
        return Difference(
            text,
            "step the schedule once for each optimizer step, not once for each process or micro-batch",
            own.lines.get("update"),
        )
    if (worst := _worst(own.after, one.after)) is not None:
        text = f"{worst[0]} is {worst[1]:.1e} off after the optimizer's step, whose gradients are right"
        return Difference(
            text,
            "an optimizer that reads whole matrices needs them: `full_tensor()`, or one that knows DTensors",
            own.lines.get("update"),
        )
    for name, kept in one.state.items():
        mine = own.state.get(name)
        if mine is None or mine.shape != kept.shape:
            text = f"{name} is {list(mine.shape) if mine is not None else 'not there'}, on one process {list(kept.shape)}: a rank's part"
            return Difference(text, "keep DTensors (no `to_local`), and read them with `full_tensor()`", None)
        if (error := relative_error(mine, kept)) > LIMIT:
            return Difference(
                f"{name} is {error:.1e} off",
                "update it from the parameters after the optimizer's step, on all ranks",
                None,
            )
    for name in {**one.buffers, **own.buffers}:
        written, right = own.buffers.get(name), one.buffers.get(name)
        if written is None or right is None or not relative_error(written, right) <= LIMIT:
            return Difference(
                f"the step writes another value into the buffer {name} than on one process",
                "make what is written of the batches of all data-parallel ranks: reduce it over them",
            )
    if one.loss is not None and (own.loss is None or not isclose(own.loss, one.loss, rel_tol=LIMIT, abs_tol=LIMIT)):
        text = f"the step returns {own.loss}, on one process {one.loss:.6g}"
        return Difference(
            text,
            "return the loss of the step: sums over all data-parallel ranks, divided by the count of the step",
            None,
        )
    return None


def _worst(own: Tensors, one: Tensors) -> tuple[str, float] | None:
    """The first tensor that differs, and by how much; one that is not there is all off. What is rounding alone beside the largest of
    them, as the gradient of a bias in front of a softmax, must be that here too."""
    largest = max(map(magnitude, one.values()), default=0.0)
    for name, value in one.items():
        mine = own.get(name)
        if magnitude(value) <= NEGLIGIBLE * largest:
            if mine is not None and not magnitude(mine) <= LIMIT * largest:
                return name, 1.0
            continue
        error = relative_error(mine, value) if mine is not None and mine.shape == value.shape else 1.0
        if not error <= LIMIT:
            return name, error
    return None


def _flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in names])


def _times(own: Tensors, one: Tensors) -> float | None:
    """By what all of `own` is a multiple of `one`."""
    names = [name for name in one if name in own]
    if not names:
        return None
    x, y = _flat(one, names), _flat(own, names)
    factor = float(x @ y / (x @ x)) if x.any() else 0.0
    return factor if factor and (y - factor * x).norm() <= 1e-6 * y.norm() else None


def _why(own: Ran, alone: Alone | None) -> str:
    if alone is None:
        return ""
    if (factor := _times(own.backward, alone.same[0].backward)) is not None:
        return f": all are {factor:.4g} times those of one process"
    names = [name for name in own.backward if all(name in run.backward for run in alone.shares)]
    mean = (
        {name: sum(run.backward[name] for run in alone.shares) / len(alone.shares) for name in names}
        if alone.shares
        else {}
    )
    if mean and (factor := _times(own.backward, mean)) is not None:  # type: ignore[arg-type]
        return ": they are the mean of what each data-parallel rank has for its own batch"
    for share, run in enumerate(alone.shares):
        if _times(own.backward, run.backward) is not None:
            return f": they are those of the batch of data-parallel rank {share} alone"
    return ""


def _of_clipping(text: str, own: Ran, one: Ran, ranks: Sequence[Ran], experts: frozenset[str]) -> Difference:
    factors = [run.factor for run in ranks]
    help = "clip by the norm over all ranks: shardplan.clip_grad_norm_(model, ...), or torch's, once, after the last backward and every scaling"
    shown = ", ".join("unequal factors" if f is None else f"{f:.4g}" for f in factors)
    if len({None if f is None else round(f, 9) for f in factors}) > 1:
        return Difference(
            f"{text}: ranks scale them by {shown}, as by norms of their own parts", help, own.lines.get("update")
        )
    if own.factor and one.factor:
        norm = sqrt(sum(float((x.double() ** 2).sum()) for x in one.backward.values()))
        used = norm * one.factor / own.factor
        guesses: Mapping[str, float] = {
            "counts what ranks have whole once for each of them": sqrt(sum(run.square for run in ranks)),
            "leaves experts out": sqrt(
                sum(float((x.double() ** 2).sum()) for n, x in one.backward.items() if n not in experts)
            ),
        }
        for why, guess in guesses.items():
            if isclose(used, guess, rel_tol=1e-3) and not isclose(guess, norm, rel_tol=1e-3):
                return Difference(
                    f"{text}: a norm of {used:.4g} in place of {norm:.4g}, which {why}", help, own.lines.get("update")
                )
        text = f"{text}: they are scaled by {own.factor:.4g}, on one process by {one.factor:.4g}"
    return Difference(text, help, own.lines.get("update"))
