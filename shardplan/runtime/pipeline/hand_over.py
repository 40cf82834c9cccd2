"""The shapes of the tensors that stages send. They follow from the shapes of a step's arguments, which all ranks know.

In a step with new shapes the first micro-batch runs ahead of the schedule, through one stage after the other, and all ranks learn what
is sent. The schedule reuses its results: so exactly the forwards of the unsharded model run, and no counter is off. If two
measured steps differ only in the sequence length, the shapes for any other length follow.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .micro_batch_inputs import Inputs

Shapes = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]  # of a step's arguments
Mode = tuple[Hashable, ...]  # what else they depend on
Sent = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor that a stage sends.

    Args:
        requires_grad: whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def example(self) -> Tensor:
        """A tensor like it, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


Handing = tuple[tuple[Handed, ...], ...]  # of each stage except the last


@dataclass(frozen=True)
class Ahead:
    """The forward of a stage on a micro-batch, ahead of the schedule.

    Args:
        received: its inputs, leaves of its graph.
        sent: its outputs.
    """

    received: Sent
    sent: Any

    def taken(self, received: Sequence[Tensor]) -> Any:
        """Return the outputs, instead of running the forward on the same numbers again. The gradients of its inputs go to `received`."""
        for one, other in zip(self.received, received, strict=True):
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(partial(_pass_on, other))
        return self.sent


def _pass_on(other: Tensor, one: Tensor) -> None:
    other.grad, one.grad = one.grad, None


@dataclass
class HandOvers:
    """The known shapes.

    Args:
        stages: the number of all stages.
        owners: stage -> its rank on the pp axis.
        parts: stage -> the module, for the stages of this rank.
        group: the pp axis.
        device: where a stage computes.
    """

    stages: int
    owners: Mapping[int, int]
    parts: Mapping[int, nn.Module]
    group: ProcessGroup
    device: torch.device
    known: dict[Mode, dict[Shapes, Handing]] = field(default_factory=dict)

    def of(self, inputs: Inputs, micro_batches: int, mode: Mode) -> tuple[Handing, dict[int, Ahead]]:
        """The tensors that the stages send in a step with these arguments; and the forwards of the first micro-batch that have
        run: none if the shapes are known. A collective over pp if the shapes are new."""
        key, known = inputs.shapes, self.known.setdefault(mode, {})
        ahead: dict[int, Ahead] = {}
        if key not in known:
            found = next((found for one in known if (found := _predicted(known, key, one)) is not None), None)
            known[key] = found if found is not None else self._measured(inputs.split(micro_batches)[0], ahead)
        return known[key], ahead

    def _measured(self, inputs: Mapping[str, Any], ahead: dict[int, Ahead]) -> Handing:
        found: list[tuple[Handed, ...]] = []
        waiting: list[dist.Work] = []
        for stage in range(self.stages - 1):
            box: list[Any] = [None]
            if stage in self.parts:
                received = tuple(self._received(stage, one) for one in (found[-1] if stage else ()))
                try:
                    part = self.parts[stage]
                    with part.no_sync() if isinstance(part, nn.parallel.DistributedDataParallel) else nullcontext():
                        sent = part(*received, **inputs)
                    box = [tuple(Handed(tuple(x.shape), x.dtype, x.requires_grad) for x in sent)]
                except Exception as error:
                    box = [f"{type(error).__name__}: {error}"]
                    failure: Exception | None = error
                else:
                    failure = None
                    ahead[stage] = Ahead(received, sent)
            owner = dist.get_global_rank(self.group, self.owners[stage])
            dist.broadcast_object_list(box, src=owner, group=self.group)
            if isinstance(box[0], str):
                if stage in self.parts and failure is not None:
                    raise failure
                raise RuntimeError(f"pipeline stage {stage} failed on rank {owner}: {box[0]}")
            found.append(box[0])
            if stage in self.parts and stage < self.stages - 2:  # the last stage does not run ahead
                waiting += [sending(x.detach(), self.group, self.owners[stage + 1]) for x in sent]
        for work in waiting:
            work.wait()
        return tuple(found)

    def _received(self, stage: int, one: Handed) -> Tensor:
        x = torch.empty(one.shape, dtype=one.dtype, device=self.device)
        dist.recv(x, group=self.group, group_src=self.owners[stage - 1])
        return x.requires_grad_(one.requires_grad)


def sending(x: Tensor, group: ProcessGroup, peer: int) -> dist.Work:
    """Send a tensor to a rank of a group, without waiting."""
    work = dist.isend(x, group=group, group_dst=peer)
    assert work is not None  # this rank is in the group
    return work


def _predicted(known: Mapping[Shapes, Handing], key: Shapes, one: Shapes) -> Handing | None:
    """Predict the hand-overs of a step from two known steps that differ from it only in the length."""
    length, first = _length(key, one)
    if length is None:
        return None
    for other in known:
        again, second = _length(key, other)
        if again is None or second == first:
            continue
        rows = zip(known[one], known[other], strict=True)
        made = [[_between(a, b, first, second, length) for a, b in zip(*pair, strict=True)] for pair in rows]
        if all(value is not None for sent in made for value in sent):
            return tuple(tuple(value for value in sent if value is not None) for sent in made)
    return None


def _length(key: Shapes, other: Shapes) -> tuple[int | None, int]:
    """The lengths of two steps whose arguments' shapes differ in one number only, at any places; (None, 0) for other steps."""
    if len(key) != len(other):
        return None, 0
    pairs: set[tuple[int, int]] = set()
    for (name, shape, dtype), (same, another, also) in zip(key, other, strict=True):
        if (name, dtype, len(shape)) != (same, also, len(another)):
            return None, 0
        pairs |= {(a, b) for a, b in zip(shape, another, strict=True) if a != b}
        if shape[:1] != another[:1]:  # the rows
            return None, 0
    if len(pairs) != 1:
        return None, 0
    return next(iter(pairs))


def _between(a: Handed, b: Handed, first: int, second: int, length: int) -> Handed | None:
    """The tensor that is sent at a length, interpolated linearly from two measured ones."""
    if (a.dtype, a.requires_grad, len(a.shape)) != (b.dtype, b.requires_grad, len(b.shape)):
        return None
    shape = [
        Fraction(x) + Fraction(y - x, second - first) * (length - first) for x, y in zip(a.shape, b.shape, strict=True)
    ]
    if any(one.denominator != 1 or one < 1 for one in shape):
        return None
    return Handed(tuple(int(one) for one in shape), a.dtype, a.requires_grad)
