"""Whether the ranks of a tp group get the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardplan.core.mesh import Axis
from shardplan.runtime.parallel.process_groups import named_ranks
from shardplan.styles.boundary import returns_tokens
from shardplan.torchlib.private import private

from .watched import Look, Looks, Watched

EVERY = 1_000
_PARALLEL = {Axis.TP: "tensor", Axis.CP: "context", Axis.PP: "pipeline"}
SLOTS = 32  # numbers that each rank sends: one for all names, shapes and dtypes, the others for contents

_FakeTensor = private("FakeTensor")
# The mixing function of splitmix64: every bit of a word and of its place changes about half of the bits, modulo 2**64.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def same_inputs(watched: Watched) -> Looks:
    """Compare the arguments over tp, and also over cp where the plan splits the sequence of whole arguments."""
    cp = watched.mesh.cp if watched.program.resolved.context_parallel else None
    own = ("labels", "shift_labels") if returns_tokens(watched.program.resolved.on_cp) else ()  # a rank's own tokens
    looks = [
        comparing(mesh, axis, own if axis is Axis.CP else ())
        for axis, mesh in ((Axis.TP, watched.mesh.tp), (Axis.CP, cp))
        if mesh is not None and mesh.size() > 1
    ]

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        for one in looks:
            one(module, args, kwargs)

    return {watched.outer: look} if looks else {}


def comparing(mesh: DeviceMesh, axis: Axis = Axis.TP, own: Collection[str] = ()) -> Look:
    """Compares the tensor arguments of a model's training forwards over an axis, at some of them: `is_compared`.

    It compares the names, shapes, dtypes and contents of the tensors among the arguments, but not the contents of DTensors,
    other subclasses and sparse tensors. The process waits for the first comparison. Later ones run concurrently with the
    model, and the next forward reads their result.

    RuntimeError names the arguments and the ranks whose batch differs from rank 0's.

    Args:
        mesh: the one-dimensional mesh of the axis.
        own: the arguments that differ between ranks by design.
    """
    count = 0
    running: _Comparison | None = None

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal count, running
        inputs = {name: x for name, x in _tensors(args, kwargs).items() if name not in own}
        if in_a_graph(inputs):
            return
        if running is not None:
            earlier, running = running, None
            earlier.finish()
        if not (module.training and torch.is_grad_enabled()):
            return
        # Only this count decides whether ranks compare, because their batches may differ.
        count += 1
        if is_compared(count):
            running = _begin(inputs, mesh, count, axis)
        if count == 1 and running is not None:
            earlier, running = running, None
            earlier.finish()

    return look


def is_compared(count: int) -> bool:
    """Whether the inputs of a training forward are compared: the 1st, 2nd, 4th, 8th, ..., 512th, then every 1,000th.

    Args:
        count: the forward's number, from 1.
    """
    return count % EVERY == 0 or (count < EVERY and count & (count - 1) == 0)


def named_arguments(args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a forward by name, sorted; positional ones are `argument 0` and so on."""
    named = {**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}
    return {name: named[name] for name in sorted(named)}


def _tensors(args: tuple, kwargs: dict) -> dict[str, Tensor]:
    return {name: x for name, x in named_arguments(args, kwargs).items() if isinstance(x, Tensor)}


def in_a_graph(inputs: dict[str, Tensor]) -> bool:
    """Whether this forward is being recorded rather than run: no part of a comparison may enter the graph."""
    return (
        torch.compiler.is_compiling()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or any(isinstance(x, _FakeTensor) for x in inputs.values())
    )


@dataclass(frozen=True)
class _Comparison:
    """A comparison in progress.

    Args:
        names: the arguments, in their order.
        shown: their names, dtypes and shapes on this rank.
        table: the numbers of all ranks, [ranks, SLOTS] int64 on the CPU, once `done` has returned.
        done: waits for them.
        count: the number of the training forward, from 1.
        axis: the axis whose ranks are compared.
        ranks: those ranks, as the job numbers them.
    """

    names: tuple[str, ...]
    shown: str
    table: Tensor
    done: Callable[[], object]
    count: int
    axis: Axis
    ranks: tuple[int, ...]

    def finish(self) -> None:
        """Raise RuntimeError where a rank's numbers differ from those of the axis's first rank."""
        self.done()
        rows = self.table.tolist()
        wrong = {
            slot: ranks
            for slot in range(SLOTS)
            if (ranks := [rank for rank, row in zip(self.ranks, rows, strict=True) if row[slot] != rows[0][slot]])
        }
        if not wrong:
            return
        listed = [f"{self._named(slot)} on {named_ranks(ranks)}" for slot, ranks in wrong.items()]
        if 0 in wrong:  # then the contents' numbers are in other slots
            listed = [
                f"the names, shapes or dtypes of the inputs on {named_ranks(wrong[0])} (this rank has {self.shown})"
            ]
        raise RuntimeError(
            f"{_PARALLEL[self.axis]}-parallel ranks need the same batch, but in training forward {self.count} these inputs "
            f"differ from those of rank {self.ranks[0]}: {'; '.join(listed)}. Pass the sampler the data-parallel rank and size, not those of the world"
        )

    def _named(self, slot: int) -> str:
        return " or ".join(name for i, name in enumerate(self.names) if _slot(i) == slot)


def _slot(argument: int) -> int:
    return 1 + argument % (SLOTS - 1)


def _begin(inputs: dict[str, Tensor], mesh: DeviceMesh, count: int, axis: Axis) -> _Comparison:
    """Send this rank's numbers, without waiting for the device."""
    shown = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in inputs.items())
    mine = torch.zeros(SLOTS, dtype=torch.int64, device=mesh.device_type)
    mine[0].fill_(int.from_bytes(hashlib.sha256(shown.encode()).digest()[:7], "big"))
    for i, x in enumerate(inputs.values()):
        if _has_contents(x):
            mine[_slot(i)].add_(content(x).to(mine.device, non_blocking=True))
    table = mine.repeat(mesh.size(), 1)
    ranks = tuple(mesh.mesh.tolist())
    work = dist.all_gather(list(table.unbind()), mine, group=mesh.get_group(), async_op=True)
    assert work is not None  # this rank is in the group
    if table.device.type == "cpu":
        return _Comparison(tuple(inputs), shown, table, work.wait, count, axis, ranks)
    work.wait()  # the device's later work on its stream waits; this process does not
    host = torch.empty_like(table, device="cpu", pin_memory=True)
    host.copy_(table, non_blocking=True)
    copied = torch.get_device_module(table.device).Event()
    copied.record()
    return _Comparison(tuple(inputs), shown, host, copied.synchronize, count, axis, ranks)


def _has_contents(x: Tensor) -> bool:
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
        return False
    return not (x.is_nested or x.is_quantized or x.is_meta)


def content(x: Tensor) -> Tensor:
    """A number for the bits of a strided tensor and their places: an int64 scalar on its device."""
    data = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = torch.zeros(-(-data.numel() // 8), dtype=torch.int64, device=x.device)
    words.view(torch.uint8)[: data.numel()].copy_(data)
    words.bitwise_xor_(torch.arange(1, words.numel() + 1, device=x.device).mul_(_GOLDEN))
    for shift, factor in _ROUNDS:
        shifted = (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # an int64 shift copies the sign bit
        words.bitwise_xor_(shifted).mul_(factor)
    return words.sum()
