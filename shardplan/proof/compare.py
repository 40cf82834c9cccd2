"""The one definition of "equal", and the rows of a proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardplan.core.report import Comparison

from .steps import Step

# Per tensor, the largest difference over the largest reference value. In float32 at most this is equal; above it the
# case runs again in float64, where at most the other is.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
NEGLIGIBLE = 1e-12  # of the model's largest gradient: a reference below it everywhere proves nothing

Ranked = Iterable[tuple[str, Tensor]]  # (the rank in words, the tensor that it has, whole)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest reference value; infinite for another shape or a value that is not
    finite."""
    if value.shape != reference.shape or not torch.isfinite(value).all():
        return float("inf")
    difference = magnitude(value.double() - reference.double())
    scale = magnitude(reference)
    return difference / scale if scale else (0.0 if difference == 0.0 else float("inf"))


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def compare(name: str, kind: str, values: Ranked, reference: Tensor, floor: float = 0.0) -> Comparison:
    """Compare what each rank has with the reference.

    Args:
        floor: a reference whose largest value is at most this proves nothing, unless the value is wrong all the same.
    """
    dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
    where, error = max(((rank, relative_error(value, reference)) for rank, value in values), key=lambda e: e[1])
    verdict = "equal" if error <= TOLERANCE[dtype] else "differs"
    if magnitude(reference) <= floor:
        verdict = "unproven"
    return Comparison(name, kind, error, where, verdict, str(dtype).removeprefix("torch."))


def compare_step(
    reference: Step, loss: Ranked, logits: Ranked, gradients: Mapping[str, Ranked]
) -> tuple[Comparison, ...]:
    """Compare a sharded step with the unsharded one: the loss, the logits, every gradient.

    A gradient that the unsharded model has and the sharded one has not, or the other way round, differs.
    """
    floor = NEGLIGIBLE * max((magnitude(g) for g in reference.gradients.values()), default=0.0)
    rows = [compare("loss", "loss", loss, reference.loss), compare("logits", "logits", logits, reference.logits)]
    for name, expected in reference.gradients.items():
        if name in gradients:
            rows.append(compare(name, "gradient", gradients[name], expected, floor))
    dtype = str(reference.loss.dtype).removeprefix("torch.")
    for name in sorted(reference.gradients.keys() ^ gradients.keys()):
        rows.append(Comparison(name, "gradient", float("inf"), "every rank", "differs", dtype))
    return tuple(rows)
