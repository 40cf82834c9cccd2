"""The reference: real processes, three steps on three batches, held against the unsharded model in the same process.

It knows torch and the public API of shardplan alone, and nothing of its proof. Only a plan that `apply_plan` refuses is
applied by the compiler itself (`tests/adversaries/anyway.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardplan
from tests.processes import RanksFailed, on_ranks

from .adversary import Adversary, tensors
from .anyway import NotAppliedError, apply_anyway

Truth = Literal["right", "wrong", "crashed", "not applied"]
FLOAT32, FLOAT64, EXACT = (
    1e-5,
    1e-6,
    1e-9,
)  # the largest difference of two equal tensors, of the largest reference value
NOTHING = 1e-12  # of the largest gradient: a gradient below it everywhere says nothing


@dataclass(frozen=True)
class Judgement:
    """What the reference says.

    Args:
        truth: "right"; "wrong"; "crashed": a rank raised; "not applied": the plan does not bind to the model.
        worst: the tensor that differs most, or the exception.
        error: by how much, of its largest reference value.
    """

    truth: Truth
    worst: str = ""
    error: float = 0.0

    @property
    def right(self) -> bool:
        return self.truth == "right"


def judge(adversary: Adversary, *, anyway: bool) -> Judgement:
    """Train the model with its plan and without.

    Args:
        anyway: apply the plan though `apply_plan` refuses it.
    """
    if adversary.exact:
        return _judge(adversary, torch.float64, EXACT, anyway)
    judgement = _judge(adversary, torch.float32, adversary.rounding or FLOAT32, anyway)
    if judgement.truth == "wrong" and adversary.rounding is None:
        judgement = _judge(adversary, torch.float64, FLOAT64, anyway)
    return judgement


def _judge(adversary: Adversary, dtype: torch.dtype, tolerance: float, anyway: bool) -> Judgement:
    try:
        found = on_ranks(adversary.tp, errors, adversary, dtype, anyway, seconds=100.0)
    except RanksFailed as failed:
        lines = [text.strip().splitlines() for text in failed.errors.values()]
        worst = next((said[-1] for said in lines if said and "no answer" not in said[-1]), "no answer in time")
        kind = "not applied" if NotAppliedError.__name__ in worst else "crashed"
        return Judgement(kind, worst.rpartition(f"{NotAppliedError.__name__}: ")[2][:200])
    worst, error = max((pair for rank in found for pair in rank.items()), key=lambda pair: pair[1])
    return Judgement("right" if error <= tolerance else "wrong", worst, error)


def errors(adversary: Adversary, dtype: torch.dtype, anyway: bool) -> dict[str, float]:
    """Of this rank: the error of every output, loss, gradient, buffer and parameter, the largest of all steps."""
    mesh = init_device_mesh("cpu", (adversary.tp,), mesh_dim_names=("tp",))
    reference, model = adversary.model(dtype), adversary.model(dtype)
    sharded = _applied(adversary, model, mesh, anyway)
    orders = {name: _order(p.detach(), whole(dict(_parameters(sharded))[name])) for name, p in _parameters(reference)}
    runs = [_Run(adversary, reference, dtype, False, {}), _Run(adversary, sharded, dtype, True, orders)]
    result: dict[str, float] = {}
    for step in range(len(adversary.seeds)):
        expected, seen = (run.step(step) for run in runs)
        floor = NOTHING * max((_size(v) for k, v in expected.items() if k.startswith("gradient ")), default=0.0)
        for name in expected.keys() | seen.keys():
            error = _error(seen.get(name), expected.get(name), floor)
            result[name] = max(error, result.get(name, 0.0))
    return result


def _applied(adversary: Adversary, model: nn.Module, mesh: DeviceMesh, anyway: bool) -> nn.Module:
    if anyway:
        return apply_anyway(adversary, model, mesh)
    return shardplan.apply_plan(
        shardplan.Model(model, inputs=adversary.given_inputs),
        mesh,
        adversary.plan,
        sequence_parallel=adversary.sequence_parallel,
        prove=False,
    )


@dataclass
class _Run:
    """One of the two runs."""

    adversary: Adversary
    model: nn.Module
    dtype: torch.dtype
    sharded: bool
    orders: dict[str, tuple[int, Tensor] | None]

    def __post_init__(self) -> None:
        self.optimizer = self.adversary.optimizer([p for p in self.model.parameters() if p.requires_grad])

    def step(self, number: int) -> dict[str, Tensor]:
        """Forward, backward and a step of the optimizer; everything that can be compared, by kind and name."""
        adversary, seen = self.adversary, {}
        if adversary.before is not None:
            adversary.before(self.model, number)
        self.optimizer.zero_grad()
        for micro in range(adversary.micro_batches):
            torch.manual_seed(number + 1000)
            output = self.model(**adversary.batch(adversary.seeds[number] + 100 * micro, self.dtype))
            loss = adversary.loss(output) / adversary.micro_batches
            loss.backward()
            values = {f"output{place}": value for place, value in tensors(output) if value.is_floating_point()}
            seen |= {f"{name} of {micro}": whole(value) for name, value in {**values, "loss": loss}.items()}
        if adversary.max_norm is not None:
            clip = shardplan.clip_grad_norm_ if self.sharded else nn.utils.clip_grad_norm_
            norm = clip([p for p in self.model.parameters() if p.requires_grad], adversary.max_norm)
            seen["norm"] = whole(norm) if isinstance(norm, Tensor) else torch.tensor(norm)
        for name, parameter in _parameters(self.model):
            if parameter.grad is not None:
                seen[f"gradient {name}"] = self._own_order(name, whole(parameter.grad))
        self.optimizer.step()
        seen |= {f"parameter {n}": self._own_order(n, whole(p)) for n, p in _parameters(self.model)}
        seen |= {f"buffer {n}": whole(b) for n, b in self.model.named_buffers(remove_duplicate=False)}
        return {name: value.detach().clone() for name, value in seen.items()}

    def _own_order(self, name: str, value: Tensor) -> Tensor:
        order = self.orders.get(name)
        return value if order is None else value.index_select(*order)


def whole(tensor: Tensor) -> Tensor:
    """A DTensor as the whole tensor; a plain one as it is."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """With every name of those that have several."""
    return list(model.named_parameters(remove_duplicate=False))


def _order(before: Tensor, after: Tensor) -> tuple[int, Tensor] | None:
    """How the rows (or columns) of a packed parameter stand in its shards, read off the values: (dim, for each of `before`
    its index in `after`). None: in their own order."""
    if before.shape != after.shape or torch.equal(before, after.detach()):
        return None
    for dim in range(before.dim()):
        ours, theirs = (x.movedim(dim, 0).flatten(1).tolist() for x in (before, after.detach()))
        place = {tuple(row): i for i, row in enumerate(theirs)}
        if len(place) == len(ours) and all(tuple(row) in place for row in ours):
            return dim, torch.tensor([place[tuple(row)] for row in ours])
    return None


def _size(value: Tensor) -> float:
    return value.abs().max().item() if value.numel() else 0.0


def _error(seen: Tensor | None, expected: Tensor | None, floor: float) -> float:
    """The largest difference, of the largest reference value. What only one of them has must be nothing."""
    if seen is None or expected is None:
        one = seen if expected is None else expected
        return 0.0 if _size(one) <= floor else float("inf")
    if seen.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    seen, expected = seen.double(), expected.double()
    difference, scale = (seen - expected).abs().max().item(), expected.abs().max().item()
    if scale <= floor and seen.abs().max().item() <= floor:
        return 0.0
    if math.isnan(difference):
        return float("inf")
    return difference / scale if scale else float("inf") if difference else 0.0
