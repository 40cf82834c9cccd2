"""Optimizers that raise in the middle of a step on DTensor parameters, after stepping some of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# A class (a package's class by its name) -> the operation in its step that DTensor has no rule for, and what to write.
_UNFIT: dict[tuple[type | str, ...], tuple[str, str]] = {
    (torch.optim.Adafactor, "transformers.optimization.Adafactor"): (
        "takes means of rows and columns in place",
        "Write torch.optim.AdamW(...), whose two moments are sharded as the parameters are, or shardplan.optimizers.Muon(model, ...)",
    ),
    ("pytorch_optimizer.optimizer.shampoo.Shampoo", "pytorch_optimizer.optimizer.soap.SOAP"): (
        "multiplies whole matrices, and keeps plain tensors of them",
        "Write shardplan.optimizers.Muon(model, whole_matrix=stepped_by(...)), which hands it whole matrices",
    ),
    ("pytorch_optimizer.optimizer.lamb.Lamb",): ("changes norms in place", "Write timm.optim.Lamb(...)"),
    (torch.optim.Rprop,): ("writes at places that a mask chooses", "Write torch.optim.AdamW(...)"),
}
_UNFUSED = (torch.optim.SGD, torch.optim.Adagrad)


def refuse_unfit(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that cannot step its parameters."""
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return
    for kinds, (what, instead) in _UNFIT.items():
        if _is_one(optimizer, kinds):
            raise ValueError(_message(type(optimizer).__name__, what, instead))
    if isinstance(optimizer, _UNFUSED) and any(group.get("fused") for group in optimizer.param_groups):
        name = f"{type(optimizer).__name__}(..., fused=True)"
        raise ValueError(_message(name, "is one kernel", f"Write {type(optimizer).__name__}(..., foreach=True)"))


def _is_one(optimizer: Optimizer, kinds: Iterable[type | str]) -> bool:
    own = {kind for one in type(optimizer).__mro__ for kind in (one, f"{one.__module__}.{one.__qualname__}")}
    return not own.isdisjoint(kinds)


def _message(name: str, what: str, instead: str) -> str:
    return f"{name} cannot step the parameters of a planned model: it {what}, and DTensor has no rule for that. Nothing was changed. {instead}"
