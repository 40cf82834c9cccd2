"""Whether an operand contributes to an operation's result, or bends it: the operation is run again with the operand changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

FACTOR = 1e4  # multiplied by this, a value that a tolerance hides is far above the tolerance

LARGE = 100  # an integer of any width
SCALES = (2.0**20, 2.0**-40)  # multiplied by a power of two, numbers of any precision are rounded as before
BENT = 1e-3  # of the result
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the operation, from its operands to its results


def parts_of(run: Run, operands: Sequence[Tensor], positions: Iterable[int]) -> dict[int, bool]:
    """Whether the operands at these positions change the results of an operation.

    Each is multiplied by 1e4, and is replaced by random values of its own and of the results' magnitude. Where the result is
    zero everywhere, all-zero operands (a closed gate) are replaced too, as they may be nonzero in other runs.

    Args:
        run: the operation. It gets copies, so it may write into them.
        operands: the tensors that it reads.
        positions: positions among the operands; `~position` asks whether the results are not linear in the operand.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = _run(run, operands)
        size = max((_size(t) for t in before or ()), default=0.0)
        gates = [] if size else [i for i, t in enumerate(operands) if t.is_floating_point() and not bool(t.any())]
        return {
            position: _bends(run, operands, ~position)
            if position < 0
            else any(
                _differ(before, _run(run, changed))
                for changed in _changes(operands, position, gates, max(size, 1.0), generator)
            )
            for position in positions
        }


def _bends(run: Run, operands: Sequence[Tensor], position: int) -> bool:
    """Whether what an operand adds to the results does not grow and shrink as the operand does."""
    found = []
    for factor in (0.0, 1.0, *SCALES):
        torch.manual_seed(0)
        found.append(_run(run, [t * factor if i == position else t for i, t in enumerate(operands)]))
    if any(results is None for results in found):
        return True
    for without, plain, *others in zip(*found, strict=True):
        if plain.is_floating_point():
            for factor, other in zip(SCALES, others, strict=True):
                grown = (plain - without) * factor
                if _size((other - without) - grown) > BENT * _size(grown):
                    return True
    return False


def _changes(
    operands: Sequence[Tensor], position: int, gates: Sequence[int], size: float, generator: torch.Generator
) -> Iterable[list[Tensor]]:
    operand = operands[position]
    for new in (
        (
            operand * FACTOR,
            _random(operand, max(size, _size(operand)), generator),
            _random(operand, FACTOR * max(size, _size(operand)), generator),
        )
        if operand.is_floating_point()
        else (torch.full_like(operand, fill) for fill in (0, 1, LARGE))
    ):
        opened = [_random(t, 1.0, generator) if i in gates and i != position else t for i, t in enumerate(operands)]
        opened[position] = new
        yield opened


def _random(like: Tensor, size: float, generator: torch.Generator) -> Tensor:
    return (torch.randn(like.shape, generator=generator) * size).to(like.dtype)


def _size(value: Tensor) -> float:
    if not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.nan_to_num(value.detach().float(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())


def _run(run: Run, operands: Sequence[Tensor]) -> list[Tensor] | None:
    """The results; None where the operation raises (for example, on indices that do not fit)."""
    try:
        return list(run([t.detach().clone() for t in operands]))
    except Exception:  # the operation may raise anything on other numbers
        return None


def _differ(before: Sequence[Tensor] | None, after: Sequence[Tensor] | None) -> bool:
    if before is None or after is None or len(before) != len(after):
        return True
    return any(
        a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=0.0, atol=0.0, equal_nan=True)
        for a, b in zip(before, after, strict=True)
        if not a.is_complex()  # code asks for comparisons and counts too
    )
