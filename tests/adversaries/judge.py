"""The reference: real processes, three steps on three batches, held against the unsharded model in the same process.

It knows torch and the public API of shardplan alone, and nothing of its proof. Only a plan that `apply_plan` refuses is
applied by the compiler itself (`tests/adversaries/anyway.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardplan
from tests.processes import RanksFailed, on_ranks
from tests.small_models import share_of, whole

from .adversary import Adversary
from .anyway import NotAppliedError, apply_anyway
from .runs import Sharded, Unsharded, parameters, parts_of

Truth = Literal["right", "wrong", "raised", "crashed", "not applied"]
FLOAT32, FLOAT64, EXACT = (
    1e-5,
    1e-6,
    1e-9,
)  # the largest difference of two equal tensors, of the largest reference value
NOTHING = 1e-12  # of the largest gradient: a gradient below it everywhere says nothing
OURS = ("RuntimeError", "ValueError", "TypeError", "PlanError")  # what shardplan says with
PACKAGE = Path(shardplan.__file__).parent
CAUSED = "The above exception was the direct cause of the following exception"


@dataclass(frozen=True)
class Judgement:
    """What the reference says.

    Args:
        truth: "right"; "wrong"; "raised": shardplan itself said that something is wrong; "crashed": a rank raised anything else;
            "not applied": the plan does not bind to the model.
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
        found = on_ranks(adversary.ranks, errors, adversary, dtype, anyway, seconds=100.0)
    except RanksFailed as failed:
        said = [text for text in failed.errors.values() if text.strip() and "no answer" not in text]
        worst = said[0].strip().splitlines()[-1] if said else "no answer in time"
        if NotAppliedError.__name__ in worst:
            return Judgement("not applied", worst.rpartition(f"{NotAppliedError.__name__}: ")[2][:200])
        return Judgement("raised" if any(map(said_by_us, said)) else "crashed", worst[:200])
    missing = frozenset.intersection(*(absent for _, absent in found))
    if missing:
        return Judgement("wrong", f"on no rank: {min(missing)}", float("inf"))
    worst, error = max((pair for rank, _ in found for pair in rank.items()), key=lambda pair: pair[1])
    return Judgement("right" if error <= tolerance else "wrong", worst, error)


def said_by_us(text: str) -> bool:
    """Whether the first error of a traceback was raised by a statement of the package (not by torch, that it called), and is none of its
    own bugs."""
    first = text.partition(CAUSED)[0]
    frames = re.findall(r'^  File "([^"]+)".*\n    (.*)\n(?:    .*\n)*([\w.]+)', first, re.MULTILINE)
    if not frames:
        return False
    file, code, error = frames[-1]
    return f"{PACKAGE}/" in file and code.startswith("raise ") and error.rpartition(".")[2] in OURS


def errors(adversary: Adversary, dtype: torch.dtype, anyway: bool) -> tuple[dict[str, float], frozenset[str]]:
    """As `_errors`."""
    with adversary.around():
        return _errors(adversary, dtype, anyway)


def _errors(adversary: Adversary, dtype: torch.dtype, anyway: bool) -> tuple[dict[str, float], frozenset[str]]:
    """Of this rank: the error of every output, loss, gradient, buffer and parameter, the largest of all steps; and the names of
    the parameters and buffers that it does not have."""
    mesh = shardplan.build_mesh(**{"tp": 1, "dp_shard": 1, **adversary.mesh})
    own, shares = share_of(mesh)
    copies = [adversary.model(dtype) for _ in range(shares)]
    model = adversary.model(dtype)
    sharded = _applied(adversary, model, mesh, anyway)
    there = {name: value for part in parts_of(sharded) for name, value in parameters(part)}
    # Detached: full_tensor() of a packed parameter itself raises.
    orders = {n: _order(p.detach(), whole(there[n].detach())) for n, p in parameters(copies[own]) if n in there}
    if adversary.after is not None:
        for one in (*copies, *parts_of(sharded)):
            adversary.after(one)
    cp = mesh["cp"] if adversary.own_tokens else None
    runs = [Unsharded(adversary, copies, own, dtype), Sharded(adversary, sharded, own, dtype, orders, cp)]
    result: dict[str, float] = {}
    absent: set[str] = set()
    for step in range(len(adversary.seeds)):
        expected, seen = (run.step(step) for run in runs)
        # A forward may make buffers (a mask that it keeps).
        held = there.keys() | {n for part in parts_of(sharded) for n, _ in part.named_buffers(remove_duplicate=False)}
        floor = NOTHING * max((_size(v) for k, v in expected.items() if k.startswith("gradient ")), default=0.0)
        for name in expected.keys() | seen.keys():
            kind, _, module = name.partition(" ")
            if kind in ("gradient", "parameter", "buffer") and module not in held:
                absent.add(module)
                continue
            error = _error(seen.get(name), expected.get(name), floor)
            result[name] = max(error, result.get(name, 0.0))
    return result, frozenset(absent)


def _applied(adversary: Adversary, model: nn.Module, mesh: DeviceMesh, anyway: bool) -> nn.Module | shardplan.Pipeline:
    options = adversary.applying
    if adversary.validated is not None:
        other = shardplan.Model(adversary.model(validated=True), inputs=adversary.given_inputs)
        shardplan.validate(
            other, adversary.plan, {"tp": 1, **adversary.mesh}, sequence_parallel=adversary.sequence_parallel
        )
    given = shardplan.Model(model, inputs=adversary.given_inputs)
    prove = adversary.validated is not None or adversary.autocast is not None
    try:
        return shardplan.apply_plan(given, mesh, adversary.plan, **options, prove=prove)
    except shardplan.PlanError:
        if not anyway:
            raise
        return apply_anyway(adversary, model, mesh)


def _order(before: Tensor, after: Tensor) -> tuple[int, Tensor] | None:
    """How the rows (or columns) of a packed parameter stand in its shards, read off the values: (dim, for each of `before`
    its index in `after`). None: in their own order."""
    if before.shape != after.shape or torch.equal(before, after):
        return None
    for dim in range(before.dim()):
        ours, theirs = (x.movedim(dim, 0).reshape(x.shape[dim], -1).tolist() for x in (before, after))
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
    both = torch.isinf(expected) & (seen == expected)  # a mask of -inf
    seen, expected = (x.double().masked_fill(both, 0.0) for x in (seen, expected))
    difference, scale = (seen - expected).abs().max().item(), expected.abs().max().item()
    if scale <= floor and seen.abs().max().item() <= floor:
        return 0.0
    if math.isnan(difference):
        return float("inf")
    return difference / scale if scale else float("inf") if difference else 0.0
