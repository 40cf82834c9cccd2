"""Why a value of a user's step differs from one process: what its numbers show, and what to write instead."""

from __future__ import annotations

from collections import Counter
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
        help: what to write; None where the numbers do not show it.
        line: the script's line; None where unknown.
    """

    message: str
    help: str | None = None
    line: int | None = None


@dataclass(frozen=True)
class Alone:
    """The script's results on one process.

    Args:
        same: with the micro-batches of all ranks, one after the other.
        parts, joined: with micro-batches, and with one batch of all their rows; empty if the step draws random numbers. The micro-batches
            differ only in their labels, if the loss of a row depends on other rows.
        pieces: with each of these micro-batches separately, if parts and joined differ.
        shares: the first step with only the micro-batches of each data-parallel rank.
    """

    same: Sequence[Ran]
    parts: Sequence[Ran] = ()
    joined: Sequence[Ran] = ()
    pieces: Sequence[Ran] = ()
    shares: Sequence[Ran] = ()


MEAN = (
    "divide sums by the count of the whole step, not by that of a rank or a micro-batch: `for batch, scale in shardplan.micro_batches(model, "
    "batches): (loss * scale).backward()`"
)
OF_A_BATCH = (
    "numbers that the loss takes from a whole batch (counts, weights, baselines, choices of rows) must be those of all micro-batches "
    "of all data-parallel ranks"
)
CLIP = "clip by the norm over all ranks: shardplan.clip_grad_norm_(model, ...), or torch's, once, after the last backward and every scaling"
REDUCED = "the plan reduces gradients over ranks, tp and data-parallel: do not reduce them in the script"
UNLIKE = (
    "the script changes equal gradients differently than on one process: it reads the rank, the number of ranks, or a rank's part as "
    "if it were whole; `full_tensor()` returns the whole"
)


def off(own: Tensors, one: Tensors) -> dict[str, float]:
    """The tensors that differ, and by how much; a missing tensor counts as completely different. A tensor that is only rounding
    noise next to the largest one, such as the gradient of a bias before a softmax, must be only noise in `own` too."""
    largest, found = max(map(magnitude, one.values()), default=0.0), {}
    for name, value in one.items():
        mine = own.get(name)
        if magnitude(value) <= NEGLIGIBLE * largest:
            if mine is not None and not magnitude(mine) <= LIMIT * largest:
                found[name] = 1.0
            continue
        error = relative_error(mine, value) if mine is not None and mine.shape == value.shape else 1.0
        if not error <= LIMIT:
            found[name] = error
    return found


def worst(own: Tensors, one: Tensors) -> tuple[str, float] | None:
    """The first tensor that differs, and by how much."""
    return next(iter(off(own, one).items()), None)


def counted(names: Mapping[str, float], of: Mapping[str, Tensor]) -> str:
    """The number of differing tensors, if not all differ."""
    return "" if len(names) == len(of) else f" ({len(names)} of {len(of)} are off)"


def after_backward(own: Ran, one: Ran, alone: Alone | None, ranks: Sequence[Ran]) -> Difference:
    """Explain wrong gradients after backward. If some are right, name the wrong one nearest to the loss: errors spread from there to the inputs.

    Args:
        alone: the results of the first step, in which all runs have the same parameters.
    """
    wrong, line = off(own.backward, one.backward), own.lines.get("backward")
    if missing := [name for name in one.backward if name not in own.backward]:
        text = f"{missing[-1]} has no gradient after backward{counted(wrong, one.backward)}; on one process it has one"
        return Difference(text, "read a DTensor by its `full_tensor()`, and detach nothing", line)
    name = next(iter(wrong)) if len(wrong) == len(one.backward) else [*wrong][-1]
    text = f"the gradient of {name} is {wrong[name]:.1e} off after backward{counted(wrong, one.backward)}"
    if "reduced" in own.lines:
        return Difference(text + (_times_in_words(own.backward, one.backward) or ""), REDUCED, own.lines["reduced"])
    if alone is None:
        return Difference(text, None, line)
    if (factor := times(own.backward, one.backward)) is not None:
        help = f"{1 / factor:.4g} times this loss is right here; `for batch, scale in shardplan.micro_batches(model, batches)` has the counts and ranks in `scale`"
        return Difference(f"{text}: all are {factor:.4g} times those of one process", help, line)
    given = [run.backward for run in alone.shares]
    weights, right = weights_of(own.backward, given), weights_of(one.backward, given)
    if weights is not None:
        close = [share for share, weight in enumerate(weights) if abs(weight) > LIMIT]
        if len(given) > 1 and len(close) == 1 and isclose(weights[close[0]], 1, rel_tol=1e-4):
            text += f": they are those of the batch of data-parallel rank {close[0]} alone"
            return Difference(text, "the mean over data-parallel ranks is missing, or all ranks have one batch", line)
        if len(given) > 1 and all(isclose(weight, weights[0], rel_tol=1e-4) for weight in weights):
            text += ": they are the mean of what each data-parallel rank has for its own batch"
            if not isclose(factor := weights[0] * len(given), 1, rel_tol=1e-4):
                text += f", times {factor:.4g}"
        else:
            text += f": they are what each data-parallel rank has for its own batch, times {_listed(weights)}"
        if right is None:
            return Difference(f"{text}; one process has no such sum", OF_A_BATCH, line)
        return Difference(f"{text}, on one process times {_listed(right)}", MEAN, line)
    mean, whole = sum(sum(run.roots) for run in ranks) / len(ranks), sum(one.roots)
    if not isclose(mean, whole, rel_tol=LIMIT, abs_tol=LIMIT):
        text += (
            f"; the losses that backward begins with are {mean:.6g} in the mean over ranks, on one process {whole:.6g}"
        )
    else:
        text += f"; the losses that backward begins with are right in the mean over ranks, {whole:.6g}"
    return Difference(text, None, line)


def cut_into_micro_batches(part: Ran, joined: Ran, pieces: Sequence[Ran]) -> Difference:
    """Explain gradients after backward that differ from those of the same rows in one batch."""
    wrong, line = worst(part.backward, joined.backward), part.lines.get("backward")
    assert wrong is not None
    text = f"the step depends on how its batch is cut into micro-batches: the gradient of {wrong[0]} is {wrong[1]:.1e} off the one of the same rows in one batch"
    given = [run.backward for run in pieces]
    weights, right = weights_of(part.backward, given), weights_of(joined.backward, given)
    if weights is None:
        return Difference(f"{text}; it is not the sum of what each micro-batch gives alone", None, line)
    if right is None:
        text += "; the one batch does not give the sum of what each micro-batch gives alone"
        return Difference(text, OF_A_BATCH, line)
    text += f"; micro-batches, each alone, count {_listed(weights)} times, in one batch {_listed(right)}"
    return Difference(text, MEAN, line)


def at_the_optimizer(own: Ran, one: Ran, ranks: Sequence[Ran], experts: frozenset[str]) -> Difference:
    """Explain gradients that are right after backward, and wrong at the optimizer's step."""
    wrong, line = off(own.update, one.update), own.lines.get("update")
    name = next(iter(wrong))
    text = f"the gradient of {name} is right after backward, and {wrong[name]:.1e} off at the optimizer's step"
    if "reduced" in own.lines:
        return Difference(f"{text}{counted(wrong, one.update)}", REDUCED, own.lines["reduced"])
    norm = sqrt(sum(float((x.double() ** 2).sum()) for x in one.backward.values()))
    if one.factor and all(run.factor for run in ranks):
        factors = [run.factor or 0.0 for run in ranks]
        used = [norm * one.factor / factor for factor in factors]
        if len({round(factor, 9) for factor in factors}) > 1:
            text += f": ranks scale them by {', '.join(f'{factor:.4g}' for factor in factors)}"
            by_parts = all(isclose(a, sqrt(run.square), rel_tol=1e-3) for a, run in zip(used, ranks, strict=True))
            by_stage = sum(x**2 for x in {round(a, 6) for a in used})
            if by_parts or isclose(by_stage, norm**2, rel_tol=1e-3):
                return Difference(f"{text}, as by norms of their own parts", CLIP, line)
            return Difference(f"{text}, on one process by {one.factor:.4g}", UNLIKE, line)
        guesses: Mapping[str, float] = {
            "counts what ranks have whole once for each of them": sqrt(sum(run.square for run in ranks)),
            "leaves experts out": sqrt(
                sum(float((x.double() ** 2).sum()) for n, x in one.backward.items() if n not in experts)
            ),
        }
        for why, guess in guesses.items():
            if isclose(used[0], guess, rel_tol=1e-3) and not isclose(guess, norm, rel_tol=1e-3):
                return Difference(f"{text}: a norm of {used[0]:.4g} in place of {norm:.4g}, which {why}", CLIP, line)
        text += f": they are scaled by {factors[0]:.4g}, on one process by {one.factor:.4g}"
        return Difference(text, UNLIKE, line)
    by_rank = [run.factors for run in ranks]
    ratios = {
        n: times({n: own.update[n]}, {n: one.update[n]}) for n in one.update if n in own.update and one.update[n].any()
    }
    usual = Counter(round(r, 6) for r in ratios.values() if r is not None).most_common(1)
    if usual and None not in ratios.values() and usual[0][1] < len(ratios):
        others = {n: r for n, r in ratios.items() if r is not None and not isclose(r, usual[0][0], rel_tol=1e-5)}
        name = next(iter(others))
        text = (
            f"the gradient of {name} is right after backward, and at the optimizer's step {others[name]:.4g} times the one of one process, "
            f"as those of {len(others)} parameters; those of the other {len(ratios) - len(others)} are {usual[0][0]:.4g} times"
        )
        return Difference(text, UNLIKE, line)
    own_factors = [factors.get(name) for factors in by_rank if name in factors]
    if all(factor is not None for factor in own_factors) and len({round(f or 0.0, 9) for f in own_factors}) > 1:
        text += f": ranks scale their parts of it by {', '.join(f'{f:.4g}' for f in own_factors)}"
        return Difference(text, UNLIKE, line)
    return Difference(f"{text}{counted(wrong, one.update)}", UNLIKE, line)


def of_parameters(own: Ran, one: Ran) -> Difference:
    """Explain parameters that are wrong after a step with right gradients and rates."""
    line = own.lines.get("update")
    if one.begun and (wrong := off(own.begun, one.begun)):
        where, mine, right = "before the optimizer's step", own.begun, one.begun
    elif one.stepped and (wrong := off(own.stepped, one.stepped)):
        name = next(iter(wrong))
        text = f"{name} is {wrong[name]:.1e} off after the optimizer's step, but the gradients are right{counted(wrong, one.stepped)}"
        help = (
            "an optimizer that reads whole rows or matrices needs whole parameters: use `full_tensor()`, or an optimizer that knows "
            "DTensors"
        )
        return Difference(text, help, line)
    else:
        where, mine, right = "at the end of the step, but the gradients are right", own.after, one.after
        wrong = off(mine, right)
        if one.stepped:
            where += ", and right after the optimizer's"
    name = next(iter(wrong))
    text = f"{name} is {wrong[name]:.1e} off {where}{counted(wrong, right)}{_times_in_words(mine, right) or ''}"
    return Difference(text, UNLIKE.replace("gradients", "values"), line)


def of_updates(own: Ran, one: Ran, ranks: Sequence[Ran]) -> Difference | None:
    """Explain optimizers that step more or less often than on one process."""
    if own.updates == one.updates:
        return None
    text, line = f"optimizers step {own.updates} times, on one process {one.updates}", own.lines.get("update")
    if (counts := [run.updates for run in ranks]) and len(set(counts)) > 1:
        text += f"; those of the ranks {', '.join(map(str, counts))} times"
        return Difference(text, "decide on all ranks together whether to step: reduce the value that decides it", line)
    if one.updates == one.backs and own.updates == own.backs:
        return Difference(text, "step once, after the backward of the last micro-batch", line)
    return Difference(text, "decide whether to step by a value that is reduced over all data-parallel ranks", line)


def of_rates(own: Ran, one: Ran) -> Difference | None:
    """Compare learning rates, and other numbers of the optimizers' groups. A stage has its own groups."""
    line = own.lines.get("update")
    for key, options in own.options.items():
        for option, value in options.items():
            right = one.options.get(key, {}).get(option, value)
            if isclose(value, right, rel_tol=1e-9):
                continue
            what = "the learning rate" if option == "lr" else f"the option {option} of the optimizer"
            text = f"{what} is {value:.6g}, on one process {right:.6g}"
            if own.scheduled != one.scheduled and option == "lr":
                text += f"; schedules have stepped {own.scheduled} times, on one process {one.scheduled}"
                return Difference(text, "step a schedule once for each step of its optimizer", line)
            return Difference(text, None, line)
    return None


def of_loss(own: Ran, one: Ran, ranks: Sequence[Ran]) -> Difference | None:
    """Compare the loss that the step returns."""
    if one.loss is None or (own.loss is not None and isclose(own.loss, one.loss, rel_tol=LIMIT, abs_tol=LIMIT)):
        return None
    text = f"the step returns {own.loss}, on one process {one.loss:.6g}"
    losses = [run.loss for run in ranks if run.loss is not None]
    if own.loss is not None and len(losses) == len(ranks) and one.loss:
        if isclose(sum(losses) / len(losses), one.loss, rel_tol=LIMIT):
            return Difference(f"{text}, which is the mean over ranks", "all-reduce it, and divide by the ranks")
        if len({round(x, 12) for x in losses}) == 1:
            return Difference(f"{text}: {own.loss / one.loss:.6g} times")
        return Difference(
            f"{text}; ranks return {_listed(losses)}",
            "return the loss of the step: sums over all data-parallel ranks, divided by the count of the step",
        )
    return Difference(text)


def times(own: Tensors, one: Tensors) -> float | None:
    """The factor by which all tensors of `own` are multiples of those of `one`; None if there is none."""
    found = weights_of(own, [one])
    return found[0] if found and found[0] else None


def weights_of(own: Tensors, given: Sequence[Tensors]) -> list[float] | None:
    """The weights with which all tensors of `own` are weighted sums of those of `given`; None if there are none."""
    names = [name for name in own if all(name in each for each in given)]
    if not names or not given:
        return None
    y = _flat(own, names)
    x = torch.stack([_flat(each, names) for each in given], 1)
    found = torch.linalg.lstsq(x, y[:, None], driver="gelsd").solution[:, 0]
    return found.tolist() if (y - x @ found).norm() <= 1e-6 * y.norm() else None


def _times_in_words(own: Tensors, one: Tensors) -> str | None:
    factor = times(own, one)
    return None if factor is None else f": all are {factor:.4g} times those of one process"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _flat(tensors: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in names])
